"""Run a batch with OpenAI's own SDK: upload a file of requests, wait, read the answers.

python examples/openai_batch.py [URL]
"""

import json
import sys
import time

from openai import OpenAI

PROMPTS = ("import", "def main(", "If the file does not exist,")


def line(number: int, prompt: str) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    return json.dumps({"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body})


url = sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000"
with OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
    lines = "\n".join(line(number, prompt) for number, prompt in enumerate(PROMPTS))
    file = client.files.create(file=("requests.jsonl", lines.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    answers = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]

print(batch.status, batch.request_counts.completed, "of", batch.request_counts.total)
for answer in sorted(answers, key=lambda each: int(each["custom_id"])):  # they come in no particular order
    [choice] = answer["response"]["body"]["choices"]
    mean = sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])
    print(f"{mean:7.3f} nats per token  {PROMPTS[int(answer['custom_id'])] + choice['text']!r}")
