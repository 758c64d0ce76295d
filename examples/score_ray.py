"""Score a Ray dataset: each actor has a client, and the API's workers share the jobs of all.

python examples/score_ray.py [URL]
"""

import sys
from typing import Any

import ray

from scorepool import Client


class Scorer:
    def __init__(self, *address: str) -> None:
        self.client = Client(*address)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        pairs = zip(batch["prompt"].tolist(), batch["completion"].tolist(), strict=True)
        result = self.client.score("demo", pairs)
        return batch | {"logprob": [sequence.logprob_sum for sequence in result.sequences]}


rows = [{"prompt": "import", "completion": f" module_{number}"} for number in range(1000)]
scored = ray.data.from_items(rows).map_batches(
    Scorer, fn_constructor_args=tuple(sys.argv[1:]), concurrency=2, batch_size=256
)
print(scored.to_pandas().nlargest(3, "logprob").round(2).to_string(index=False))
