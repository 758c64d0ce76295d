"""Score and generate the rows of files, on AsyncClient.

formats.py      files by name            text_sources.py  JSONL and CSV as rows     lines.py  lines of any length
columns.py      which columns a job needs                 measures.py      the columns that a result adds
window.py       chunks of rows in flight, in order        tasks.py         chunks of rows as jobs
scorer.py       items of rows under one model             jobs.py          one job, and whose fault its failure is
completion.py, choices.py, comparison.py   what is scored of a row, and its new columns
documents.py    folders and texts as rows                 windows.py       documents in windows of a context
score_plan.py   the plan of that                          means.py         means of new columns
sinks.py        rows as bytes                             journal.py       OUT, and going on after an end
estimate.py     what it would take
process.py      all of it together                        file_run.py, functions.py, compare.py, corpus.py   one file
"""

from scorepool.files.compare import compare_file
from scorepool.files.comparison import PER_BYTE_DIFFERENCE, PER_TOKEN_DIFFERENCE
from scorepool.files.corpus import Perplexity, perplexity
from scorepool.files.documents import FILE_COLUMN
from scorepool.files.errors import BadInput, FileError, OutputError, ServerError
from scorepool.files.functions import generate_file, score_file
from scorepool.files.journal import Counts
from scorepool.files.means import Mean
from scorepool.files.process import Estimate, Summary
from scorepool.files.progress import Progress, duration

__all__ = [
    "FILE_COLUMN",
    "PER_BYTE_DIFFERENCE",
    "PER_TOKEN_DIFFERENCE",
    "BadInput",
    "Counts",
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
