"""What other weights, adapters or tenants computed is never given from the result cache, through the running stack."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from scorepool.local.stack import Stack
from scorepool.store import Keys
from tests.api.conftest import ALICE, BOB, bearer
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.oracle import Oracle
from tests.engine.test_pushed_weights import changed_copy
from tests.tiny_models import TinyModels
from tests.worker.conftest import until

URL = "/v1/models/policy/weights"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def base(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.fixture(scope="module", autouse=True)
def _serve_base(policy: Stack, base: Path) -> None:
    """Serve the model's own weights, whatever tests of other files have pushed."""
    with httpx.Client(base_url=policy.url, timeout=120, headers=bearer(BOB)) as http:
        push(http, base)


@pytest.fixture(autouse=True)
def _empty(policy: Stack) -> None:
    """Empty the cache, as docs/cache.md says."""
    with Redis.from_url(policy.redis_url) as redis:
        redis.delete(Keys.result_cache, Keys.result_cache_uses)


@pytest.fixture
def alice(policy: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=policy.url, timeout=120, headers=bearer(ALICE)) as http:
        yield http


@pytest.fixture
def bob(policy: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=policy.url, timeout=120, headers=bearer(BOB)) as http:
        yield http


def tokens(seed: int) -> list[int]:
    return [5 + (7 * seed + 3 * place) % 90 for place in range(12)]


def score(http: httpx.Client, token_ids: list[int], **fields: Any) -> dict[str, Any]:
    """Score all tokens but the first, and return the job."""
    item = {"prompt": token_ids[:1], "completion": token_ids[1:]}
    body = {"type": "score", "model": "policy", "items": [item]} | fields
    answer = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
    assert answer.status_code in (200, 202), answer.text
    return answer.json()  # type: ignore[no-any-return]


def check(job: dict[str, Any], token_ids: list[int], oracle: Oracle, *, cached: bool) -> None:
    """Check a result against transformers, and whether it was computed."""
    rows = oracle.logprobs(token_ids)
    expected = [float(rows[place - 1, token_ids[place]]) for place in range(1, len(token_ids))]
    assert job["result"]["sequences"][0]["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert job["result"]["stamp"].get("cached", False) is cached


def push(http: httpx.Client, folder: Path) -> int:
    answer = http.post(URL, json={"path": str(folder)})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["version"])


def until_written(policy: Stack, number: int) -> None:
    with Redis.from_url(policy.redis_url) as redis:
        until(lambda: redis.zcard(Keys.result_cache_uses) >= number)


def test_a_push_of_weights_makes_old_entries_unused_and_the_same_weights_use_them_again(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path
):
    first = tokens(1)
    old, new = Oracle(base), changed_copy(base, tmp_path / "new", seed=5)
    check(score(bob, first), first, old, cached=False)
    until_written(policy, 1)
    check(score(bob, first), first, old, cached=True)
    push(bob, new)
    check(score(bob, first), first, Oracle(new), cached=False)
    check(score(bob, first), first, Oracle(new), cached=True)
    version = push(bob, base)
    again = score(bob, first)
    check(again, first, old, cached=True)  # the same weights by their fingerprint, under a later version
    assert again["result"]["stamp"]["weights_version"] == version


def test_if_weights_is_kept_whatever_the_cache_holds(policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path):
    row = tokens(2)
    new = changed_copy(base, tmp_path / "new", seed=6)
    version = bob.get(URL).json()["version"]
    check(score(bob, row), row, Oracle(base), cached=False)
    until_written(policy, 1)
    check(score(bob, row, if_weights=version), row, Oracle(base), cached=True)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(score, bob, row, if_weights=version + 1)
        until(lambda: any(job["status"] == "queued" for job in bob.get("/v1/jobs").json()["jobs"]))
        assert push(bob, new) == version + 1
        check(waiting.result(), row, Oracle(new), cached=False)
    gone = score(bob, row, if_weights=version)
    assert gone["failure"]["code"] == "weights_gone"
    assert push(bob, base) == version + 2
    assert score(bob, row, if_weights=version)["failure"]["code"] == "weights_gone"


def test_an_adapter_has_entries_of_its_own_and_so_has_another_of_its_name(
    policy: Stack, bob: httpx.Client, base: Path, tmp_path: Path
):
    row = tokens(3)
    one, other = (save_adapter(base, tmp_path / f"a{seed}", seed) for seed in (1, 2))
    oracle, oracles = Oracle(base), [oracle_with(base, folder) for folder in (one, other)]
    for folder, adapted in zip((one, other), oracles, strict=True):
        loaded = bob.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(folder)})
        assert loaded.status_code == 200, loaded.text
        check(score(bob, row), row, oracle, cached=folder == other)
        check(score(bob, row, model="sql"), row, adapted, cached=False)
        until_written(policy, 2 if folder == one else 3)
        check(score(bob, row, adapter="sql"), row, adapted, cached=True)
        assert bob.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200


def test_no_tenant_gets_what_another_computed(policy: Stack, alice: httpx.Client, bob: httpx.Client, base: Path):
    row = tokens(4)
    check(score(alice, row), row, Oracle(base), cached=False)
    until_written(policy, 1)
    check(score(bob, row), row, Oracle(base), cached=False)
    check(score(alice, row), row, Oracle(base), cached=True)
    check(score(alice, row, cache_salt="s"), row, Oracle(base), cached=False)
    check(score(bob, row, cache_salt="s"), row, Oracle(base), cached=False)
    check(score(bob, row, cache_salt="s"), row, Oracle(base), cached=True)
    check(score(bob, row, cache=False), row, Oracle(base), cached=False)


def test_a_salt_divides_computed_prefixes_and_without_one_tenants_share_them(alice: httpx.Client, bob: httpx.Client):
    prompt = [5 + (11 * place) % 90 for place in range(80)]

    def cached_tokens(http: httpx.Client, last: int, **fields: str) -> int:
        items = [{"prompt": prompt, "completion": [last, last]}]
        body = {"type": "score", "model": "policy", "items": items, "cache": False} | fields
        usage = http.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"}).json()["result"]["usage"]
        return int(usage.get("cached_tokens", 0))

    assert [cached_tokens(alice, last) >= 64 for last in (7, 8, 9)] == [False, False, True]
    assert cached_tokens(bob, 10) >= 64
    assert [cached_tokens(bob, last, cache_salt="s") >= 64 for last in (7, 8, 9)] == [False, False, True]
    assert cached_tokens(bob, 7, cache_salt="t") == 0
    assert cached_tokens(alice, 7, cache_salt="s") == 0


def test_the_cache_is_bounded_in_bytes_and_counts_what_it_gave(policy: Stack, bob: httpx.Client):
    def metrics() -> dict[str, float]:
        found = re.findall(r"^scorepool_result_cache_(\S+) (\S+)$", bob.get("/metrics").text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def post(number: int) -> int:
        """Score 20 items, and return how many were given from the cache."""
        items = [{"prompt": [5], "completion": [6 + number, 7 + index, 9]} for index in range(20)]
        body = {"type": "score", "model": "policy", "items": items, "top_logprobs": 4}
        answer = bob.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})
        assert answer.status_code == 200
        return int(answer.json()["result"]["stamp"].get("cached_items", 0))

    before = metrics()
    numbers = count()
    for _ in range(20):
        post(next(numbers))

    def is_counted() -> bool:  # a little later, and not while Redis answers late: then all is computed and not counted
        number = next(numbers)
        post(number)
        until(lambda: post(number) == 20, 30)
        found = metrics()
        hits, misses = ('lookups_total{outcome="hit"}', 'lookups_total{outcome="miss"}')
        return found[hits] >= before[hits] + 20 and found[misses] >= before[misses] + 400

    until(is_counted, 120)
    found = metrics()
    assert 30_000 < found["bytes"] <= 60_000
    assert found["entries"] < 400
    with Redis.from_url(policy.redis_url) as redis:
        keys = (Keys.result_cache, Keys.result_cache_uses)
        assert sum(redis.memory_usage(key, samples=0) or 0 for key in keys) < 1.5 * 60_000
