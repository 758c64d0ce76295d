"""Filter a polars data frame by the perplexity of its texts.

python examples/score_polars.py [URL]
"""

import sys

import polars as pl

from scorepool import Client

frame = pl.DataFrame(
    {"text": ["Return the number of items.", "tsrif eht fo rebmun", "If the file does not exist, an error is raised."]}
)

with Client(*sys.argv[1:]) as client:
    scores = pl.DataFrame(client.score("demo", frame["text"], prompt="").to_arrow())
# Without BOS, the first token has no logprob, and `mean` leaves it out.
scored = pl.concat([frame, scores.select(perplexity=(-pl.col("logprobs").list.mean()).exp())], how="horizontal")
print(scored.filter(pl.col("perplexity") < 100))
