"""A worker's share of jobs by the speeds of all, against a search through every division of the jobs."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from scorepool import store
from scorepool.store.scripts import load

SHARES = f"""{load("speeds.lua")}
local speeds, shares = {{}}, {{}}
for i = 2, #ARGV do speeds['worker ' .. i] = tonumber(ARGV[i]) end
local time = time_for(speeds, tonumber(ARGV[1]))
for i = 2, #ARGV do shares[i - 1] = time and math.floor(time * speeds['worker ' .. i]) or tonumber(ARGV[1]) end
return shares"""
OF_FLEET = f"""{load("speeds.lua")}
local now, num_jobs, shares = tonumber(ARGV[1]), tonumber(ARGV[2]), {{}}
for i = 3, #ARGV do redis.call('HSET', SPEEDS_ .. 'demo', 'worker ' .. i, ARGV[i] .. ':' .. now) end
for i = 3, #ARGV do shares[i - 2] = share_of('worker ' .. i, {{'demo', 'demo:low'}}, num_jobs, now) end
return shares"""
NOW = 1_700_000_000
KNOWN = f"""{load("speeds.lua")}
local found = {{}}
for name, speed in pairs(speeds_of(ARGV[1], {{'demo'}}, tonumber(ARGV[2]))) do
  found[#found + 1] = name
  found[#found + 1] = tostring(speed)
end
return found"""


def divisions(num_jobs: int, num_workers: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide jobs among workers."""
    if num_workers == 1:
        yield (num_jobs,)
        return
    for own in range(num_jobs + 1):
        for rest in divisions(num_jobs - own, num_workers - 1):
            yield own, *rest


def best_shares(num_jobs: int, speeds: list[int]) -> list[int]:
    """Return the most jobs that each worker has in any division that ends the last job as early as possible."""

    def ends_at(division: tuple[int, ...]) -> float:
        return max(num / speed for num, speed in zip(division, speeds, strict=True))

    all_divisions = list(divisions(num_jobs, len(speeds)))
    best = min(map(ends_at, all_divisions))
    best_divisions = [division for division in all_divisions if ends_at(division) <= best * (1 + 1e-9)]
    return [max(nums) for nums in zip(*best_divisions, strict=True)]


@given(st.integers(0, 14), st.lists(st.integers(1, 40), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_share_is_the_most_of_any_division_that_ends_the_jobs_first(redis: Redis, num_jobs: int, speeds: list[int]):
    assert redis.eval(SHARES, 0, num_jobs, *speeds) == best_shares(num_jobs, speeds)


@given(st.integers(1, 100_000), st.lists(st.floats(1e-3, 1e5), min_size=2, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_shares_of_all_hold_all_jobs_and_hardly_more(redis: Redis, num_jobs: int, speeds: list[float]):
    shares = redis.eval(SHARES, 0, num_jobs, *speeds)
    assert num_jobs <= sum(shares) < num_jobs + len(speeds)


@pytest.mark.parametrize("speeds", [[5], [0, 0]])
def test_without_other_speeds_a_worker_may_have_all(redis: Redis, speeds: list[int]):
    assert redis.eval(SHARES, 0, 7, *speeds) == [7] * len(speeds)


def test_a_worker_without_a_measure_counts_with_the_mean_and_silent_ones_not_at_all(redis: Redis):
    now = 1_700_000_000
    written = {"fast": f"30:{now}", "slow": f"10:{now}", "new": f":{now}", "silent": f"99:{now - 10}"}
    old = {"gone": f"99:{now - 7200}", "broken": "x", "own": f"5:{now - 10}"}
    redis.hset(store.Keys.speeds("demo"), mapping=written | old)

    flat = redis.eval(KNOWN, 0, "own", now)

    assert {name.decode(): float(speed) for name, speed in zip(flat[::2], flat[1::2], strict=True)} == {
        "fast": 30.0,
        "slow": 10.0,
        "own": 5.0,
        "new": 15.0,
    }
    assert {*redis.hkeys(store.Keys.speeds("demo"))} == {b"fast", b"slow", b"new", b"silent", b"own"}


@given(st.integers(0, 100_000), st.lists(st.floats(1, 100), min_size=65, max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_the_shares_of_many_workers_hold_all_jobs_and_hardly_more(redis: Redis, num_jobs: int, speeds: list[float]):
    redis.flushdb()
    shares = redis.eval(OF_FLEET, 0, NOW, num_jobs, *speeds)
    assert num_jobs * 0.9999 - 1 <= sum(shares) < num_jobs * 1.0001 + len(speeds)
    assert redis.pttl(store.Keys.speed_totals("demo")) > 0


@pytest.mark.parametrize(("num_jobs", "share"), [(0, 0), (1, 1), (99, 1), (100, 1), (101, 2), (550, 6)])
def test_many_workers_of_one_speed_have_the_same_share_as_a_few_would(redis: Redis, num_jobs: int, share: int):
    assert redis.eval(OF_FLEET, 0, NOW, num_jobs, *[2] * 100) == [share] * 100


def test_a_damaged_total_is_computed_again(redis: Redis):
    for damage in (b"x", b"5 nan", b"5 -1", b"99999999999999999999 1e999"):
        redis.set(store.Keys.speed_totals("demo"), damage)
        assert redis.eval(OF_FLEET, 0, NOW, 550, *[2] * 100) == [6] * 100
    redis.delete(store.Keys.speed_totals("demo"))
    redis.lpush(store.Keys.speed_totals("demo"), "x")
    assert redis.eval(OF_FLEET, 0, NOW, 550, *[2] * 100) == [6] * 100
