"""The table of models that `python -m bench.models` writes.

shapes.py     published shapes, and checkpoints of random weights with them
system.py     one system with one model, in a process of its own that is told what to generate
measure.py    both systems in turns on one model: a row
table.py      rows as JSON, one file a machine, and the table of all files
command.py    the command
"""
