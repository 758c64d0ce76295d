"""Run many jobs from one program, 64 at a time and in bounded memory. Count those that fail instead of stopping.

python examples/gather_jobs.py [URL]
"""

import sys
from collections import Counter
from collections.abc import Iterator

from scorepool import Client, Generate

NUM_JOBS = 20  # or 100,000
TOO_LONG = 10  # the number of a prompt that does not fit into the model's context


def requests() -> Iterator[Generate]:
    for number in range(NUM_JOBS):
        prompt = "x" * 10_000 if number == TOO_LONG else f"return {number}"
        yield Generate(model="demo", prompt=prompt, max_tokens=4, temperature=0.0)


outcomes: Counter[str] = Counter()
best = (float("-inf"), "")
with Client(*sys.argv[1:]) as client:
    for number, job in enumerate(client.gather(requests())):  # in the order of the requests
        if job.result is None:
            outcomes[job.failure.code] += 1
        else:
            outcomes["result"] += 1
            [sequence] = job.result.sequences
            best = max(best, (sequence.logprob_sum, f"return {number}{sequence.text}"))
        client.delete(job.id)  # else the server keeps it for a day
print(dict(outcomes))
print(f"the likeliest is {best[1]!r} at {best[0]:.3f}")
