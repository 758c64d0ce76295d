"""The demo model that scorepool ships, and the script that trains it from text that every machine has.

`corpus` reads the running Python's own documentation and sources, `tokenizer` learns the vocabulary, `train` the
weights with `muon`, and `card` measures and describes the outcome.
Nothing outside tests and the command line imports this package; `DEMO` needs no library at all.
"""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
