"""Score and generate the rows of files, on AsyncClient.

formats/       rows from files and into them, whatever the format
scoring/       what is scored of a row, the jobs that do it, and the columns that follow
output/        OUT, and going on where another process stopped
functions.py, compare.py, corpus.py   what users call; score_plan.py plans the first two
file_run.py    one task on one file          process.py    its rows, in chunks that window.py has in flight
progress.py    how far it is                 estimate.py   what it would take
"""

from scorepool.files.compare import compare_file
from scorepool.files.corpus import Perplexity, perplexity
from scorepool.files.errors import BadInput, FileError, OutputError, ServerError
from scorepool.files.formats.documents import FILE_COLUMN
from scorepool.files.functions import generate_file, score_file
from scorepool.files.output.divergences import Divergence
from scorepool.files.output.journal import Counts
from scorepool.files.output.means import Mean
from scorepool.files.process import Estimate, Summary
from scorepool.files.progress import Progress, duration
from scorepool.files.scoring.comparison import PER_BYTE_DIFFERENCE, PER_TOKEN_DIFFERENCE

__all__ = [
    "FILE_COLUMN",
    "PER_BYTE_DIFFERENCE",
    "PER_TOKEN_DIFFERENCE",
    "BadInput",
    "Counts",
    "Divergence",
    "Estimate",
    "FileError",
    "Mean",
    "OutputError",
    "Perplexity",
    "Progress",
    "ServerError",
    "Summary",
    "compare_file",
    "duration",
    "generate_file",
    "perplexity",
    "score_file",
]
