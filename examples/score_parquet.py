"""Score a file of pairs into Parquet, and read the most surprising rows back with pyarrow.

python examples/score_parquet.py [URL]
"""

import json
import sys
import tempfile
from pathlib import Path

import pyarrow.compute as compute
import pyarrow.parquet as parquet

from scorepool import score_file

COMPLETIONS = (" an error is raised.", " a list of strings.", " the number of bytes.", " 7.")

with tempfile.TemporaryDirectory() as folder:
    pairs, out = Path(folder, "pairs.jsonl"), Path(folder, "scored.parquet")
    rows = [
        {"id": i, "prompt": "If the file does not exist,", "completion": text} for i, text in enumerate(COMPLETIONS)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))

    # Interrupted, the same call goes on where it stopped.
    summary = score_file(pairs, out, model="demo", tokens=True, url=sys.argv[1] if sys.argv[1:] else None)
    print(summary.num_rows, "rows,", summary.num_failed, "failed")

    table = parquet.read_table(out)
    order = compute.sort_indices(table["logprob_per_token"])
    for row in table.take(order).select(["id", "completion", "logprob_per_token", "ranks"]).to_pylist():
        print(f"{row['logprob_per_token']:7.3f}  {row['completion']!r}  ranks {row['ranks']}")
