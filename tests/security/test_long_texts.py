"""Whatever one tenant gives the worker to tokenize, the small jobs of another pass."""

from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool import store, wire
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer
from tests.worker.conftest import Workers, done, outcome, until

pytestmark = pytest.mark.anyio
NUM_SMALL = 4  # of the second tenant, one after the other
SLICE = "x" * 30_000  # the tokenizer takes 2 us a character
LONG = "x" * 2_000_000


def score(prompt: str, num: int) -> dict[str, Any]:
    return {"type": "score", "model": "demo", "items": [{"prompt": prompt, "completion": "y"}] * num}


def chat(content: str, num: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}] * num
    return {"type": "generate", "model": "demo", "messages": messages, "max_tokens": 1}


ATTACKS = {
    "200 items of 30 kB": [score(SLICE, 200)],
    "one text of 2 MB": [{"type": "tokenize", "model": "demo", "prompt": LONG}],
    "1024 messages of 2 kB": [chat("x" * 2000, 1024)],
    "20 jobs with 20 items of 30 kB": [score(SLICE, 20)] * 20,
    "3000 small jobs": [score("x" * 1000, 1)] * 3000,
}


@pytest.mark.soak
async def test_small_jobs_of_another_name_pass_long_texts(serving: Serving, workers: Workers, redis: Redis):
    workers.start(worker="SlowTokenizerWorker")
    until(lambda: redis.zcard(store.Keys.models))
    async with serving(api_keys=KEYS, max_bulk_jobs=3000) as http:
        for name, attack in ATTACKS.items():
            attacking = await submit(http, attack, ALICE)
            until(lambda attacking=attacking: redis.hget(f"rq:job:{attacking[0]}", "status") != b"queued")
            for _ in range(NUM_SMALL):
                (job_id,) = await submit(http, [score("hello", 1)], BOB)
                until(lambda job_id=job_id: outcome(redis, job_id))
                assert isinstance(outcome(redis, job_id), wire.Result)
            assert not set(attacking) <= set(done(redis)), f"{name} ended before the second tenant's jobs"
            for job_id in attacking[:100]:
                await http.post(f"/v1/jobs/{job_id}/cancel", headers=bearer(ALICE))


async def submit(http: httpx.AsyncClient, jobs: list[dict[str, Any]], key: str) -> list[str]:
    reply = await http.post("/v1/jobs/bulk", json=jobs, headers=bearer(key))
    assert reply.status_code == 202, reply.text[:500]
    return [job["id"] for job in reply.json()]
