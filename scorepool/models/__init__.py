"""The demo model that scorepool ships, and the scripts that train it from text that every Python installation has.

`corpus` reads the running Python's documentation and sources, `tokenizer` learns the vocabulary, `train` trains the
weights with `muon`, and `card` measures the model and writes its README. `DEMO`, the model's folder, needs no library.
"""

from pathlib import Path

DEMO = Path(__file__).parent / "demo"
