"""Print tokens with their logprobs and the likeliest other token while they are generated.

python examples/stream_logprobs.py [URL]
"""

import sys

from scorepool import Client, Generate

request = Generate(
    model="demo",
    prompt="If the file does not exist,",
    max_tokens=12,
    temperature=0.7,
    seed=3,
    top_logprobs=2,
    stream=True,
)

with Client(*sys.argv[1:]) as client:
    job = client.submit(request)
    for delta in job:  # a delta has one or more tokens, of one sequence
        for j, token in enumerate(delta.token_bytes):
            others = [each for each in delta.top_bytes[j] if each != token]
            print(
                f"{delta.logprobs[j]:8.3f}  {token.decode(errors='replace')!r:14} not {others[0].decode()!r}",
                flush=True,
            )
    print(job.result().sequences[0].text)
