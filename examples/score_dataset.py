"""Add to each row of a dataset how likely the model finds its answer.

python examples/score_dataset.py [URL]
"""

import sys
from typing import Any

from datasets import Dataset

from scorepool import Client

rows = Dataset.from_dict(
    {
        "question": ["If the file does not exist,", "If the file does not exist,", "import"],
        "answer": [" an error is raised.", " a list of strings.", " os"],
    }
)


def add_scores(batch: dict[str, list[Any]], client: Client) -> dict[str, list[Any]]:
    result = client.score("demo", zip(batch["question"], batch["answer"], strict=True))
    return {
        "logprob": [sequence.logprob_sum for sequence in result.sequences],
        "num_tokens": [len(sequence.token_ids) for sequence in result.sequences],
    }


with Client(*sys.argv[1:]) as client:
    # As an argument the client reaches the processes of `num_proc`, and the dataset's cache knows the call again.
    scored = rows.map(add_scores, batched=True, batch_size=4096, fn_kwargs={"client": client})
print(scored.to_pandas().round(2).to_string(index=False))
