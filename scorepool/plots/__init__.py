"""Draw the columns that score, generate and compare write: as PNG, as SVG, and in the terminal.

sketch.py      the distribution of any number of values      statistics.py  what each kind of plot shows, from rows
figures.py     drawing with matplotlib                        terminal.py    drawing with rich
plot_file.py   from a file to its plots

To add a kind: its statistic in statistics.py and `KINDS`, and a function in figures.py and in terminal.py.
"""

from scorepool.plots.plot_file import check_targets, plot_file
from scorepool.plots.statistics import KINDS

__all__ = ["KINDS", "check_targets", "plot_file"]
