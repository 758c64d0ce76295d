"""Rank the completions of each prompt in a pandas data frame, and generate another one.

python examples/score_pandas.py [URL]
"""

import sys

import pandas as pd

from scorepool import Client, Generate

frame = pd.DataFrame(
    {
        "prompt": ["If the file does not exist,", "If the file does not exist,", "import", "import"],
        "completion": [" a list of strings.", " an error is raised.", " the", " os"],
    }
)

with Client(*sys.argv[1:]) as client:
    scores = client.score("demo", zip(frame["prompt"], frame["completion"], strict=True)).to_pandas()
    frame["logprob"] = scores["logprob_sum"]
    frame["per_token"] = scores["logprob_sum"] / scores["token_ids"].str.len()
    frame["rank"] = frame.groupby("prompt")["per_token"].rank(ascending=False).astype(int)

    prompts = frame["prompt"].drop_duplicates()
    jobs = client.gather(Generate(model="demo", prompt=prompt, max_tokens=3, temperature=0.0) for prompt in prompts)
    texts = {prompt: job.result.sequences[0].text for prompt, job in zip(prompts, jobs, strict=True)}
frame["generated"] = frame["prompt"].map(texts)
print(frame.sort_values(["prompt", "rank"]).round(2).to_string(index=False))
