"""Redis's clock as a process knows it, and the clocks of a machine that sleeps."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from redis import Redis

import scorepool.store.clock
from scorepool.store.clock import RedisClock, awake_s, clock_s


class Machine:
    """A machine whose wall clock is wrong, and a Redis that is `way_s` away in each direction."""

    def __init__(self, ahead_s: float) -> None:
        self.passed_s = 1000.0  # since the machine started; Redis's unix time is 1e9 s later
        self.asleep_s = 0.0
        self.ahead_s = ahead_s
        self.ways_s = (0.0, 0.0)
        self.redis_ahead_s = 0.0

    def time(self) -> tuple[int, int]:
        """Answer the command TIME."""
        self.passed_s += self.ways_s[0]
        at = self.redis_s
        self.passed_s += self.ways_s[1]
        return int(at), int(at % 1 * 1e6)

    @property
    def redis_s(self) -> float:
        return 1e9 + self.passed_s + self.redis_ahead_s

    def sleep(self, for_s: float) -> None:
        self.passed_s += for_s
        self.asleep_s += for_s


@pytest.fixture(params=[300.0, -300.0], ids=["ahead", "behind"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(request.param)
    fake = SimpleNamespace(
        time=lambda: 1e9 + machine.passed_s + machine.ahead_s,
        clock_gettime=lambda _: machine.passed_s,
        monotonic=lambda: machine.passed_s - machine.asleep_s,
    )
    monkeypatch.setattr(scorepool.store.clock, "time", fake)
    return machine


def error_s(clock: RedisClock, machine: Machine) -> float:
    return abs(clock.now_s() - machine.redis_s)


def test_the_clock_is_that_of_redis_and_goes_on_without_it(machine: Machine):
    clock = RedisClock()
    assert error_s(clock, machine) == pytest.approx(300)  # not measured

    clock.measure(machine)
    assert error_s(clock, machine) < 1e-3
    machine.passed_s += 3600
    assert error_s(clock, machine) < 1e-3
    assert clock.now().timestamp() == pytest.approx(machine.redis_s)


def test_the_time_is_right_after_a_sleep(machine: Machine):
    clock = RedisClock()
    clock.measure(machine)
    machine.sleep(8 * 3600)

    assert error_s(clock, machine) < 1e-3
    assert clock_s() - awake_s() == 8 * 3600


def test_a_slow_answer_does_not_spoil_what_a_fast_one_measured(machine: Machine):
    clock = RedisClock()
    machine.ways_s = (0.01, 0.01)
    clock.measure(machine)
    machine.ways_s = (0.01, 20.0)
    clock.measure(machine)

    assert error_s(clock, machine) < 0.001


def test_the_best_of_several_samples_counts(machine: Machine):
    clock = RedisClock()
    ways = iter([(0.0, 9.0), (0.02, 0.02), (4.0, 0.0)])
    answer = machine.time

    def time() -> tuple[int, int]:
        machine.ways_s = next(ways)
        return answer()

    clock.measure(SimpleNamespace(time=time), num_samples=3)

    assert error_s(clock, machine) < 0.001


def test_a_clock_of_redis_that_is_set_is_followed(machine: Machine):
    clock = RedisClock()
    clock.measure(machine)
    machine.ways_s, machine.redis_ahead_s = (0.1, 0.1), -3600.0  # by a slow answer, too
    clock.measure(machine)

    assert error_s(clock, machine) < 0.2


def test_drift_is_followed(machine: Machine):
    clock = RedisClock()
    clock.measure(machine)
    machine.ways_s = (0.05, 0.05)
    for _ in range(100):
        machine.passed_s += 60
        machine.redis_ahead_s += 60 * 5e-5
        clock.measure(machine)

    assert error_s(clock, machine) < 0.2


def test_the_clock_of_a_real_redis_is_measured(redis: Redis):
    clock = RedisClock()
    clock.measure(redis, num_samples=3)
    seconds, microseconds = redis.time()

    assert clock.now_s() == pytest.approx(seconds + microseconds / 1e6, abs=1)


@pytest.mark.parametrize("clock", [clock_s, awake_s])
def test_the_clocks_of_the_machine_go_forward(clock: Callable[[], float]):
    first = clock()
    assert first <= clock() < first + 60
