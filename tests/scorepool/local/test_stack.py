"""The stack restarts a process that died, with growing delays if it dies early again and again."""

import subprocess
from pathlib import Path

import pytest

from scorepool.local import stack as stack_module
from scorepool.local.stack import MAX_RESTART_DELAY_S, STEADY_S, Stack


class DyingStack(Stack):
    """A stack whose worker ends at once. Nothing else runs."""

    starts: int = 0

    def start_worker(self, now_s: float) -> None:
        self._start("worker demo", [], {})
        self._started_at["worker demo"] = now_s

    def _start(self, name: str, command: list[str], extra_environ: dict[str, str]) -> None:
        self.starts += 1
        self._commands[name] = (command, extra_environ)
        self._processes[name] = subprocess.Popen(["false"])
        self._processes[name].wait()
        self._started_at[name] = stack_module.time.monotonic()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(stack_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def stack(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> DyingStack:
    stack = DyingStack(["demo=x"], state=tmp_path, environ={}, redis_url="redis://x")
    monkeypatch.setattr(stack, "_child_reaper", type("Reaper", (), {"unwatch": lambda *_: None})(), raising=False)
    stack.start_worker(clock[0])
    return stack


def seconds_until_restart(stack: DyingStack, clock: list[float]) -> float:
    started_at, starts = clock[0], stack.starts
    while stack.starts == starts:
        stack.restart_dead()
        clock[0] += 0.5 if stack.starts == starts else 0.0
    return clock[0] - started_at


def test_a_process_that_dies_early_is_restarted_with_growing_delays(stack: DyingStack, clock: list[float]):
    delays = [seconds_until_restart(stack, clock) for _ in range(9)]

    assert delays == [0, 1, 2, 4, 8, 16, 32, MAX_RESTART_DELAY_S, MAX_RESTART_DELAY_S]


def test_a_process_that_was_steady_is_restarted_at_once(stack: DyingStack, clock: list[float]):
    for _ in range(4):
        seconds_until_restart(stack, clock)
    clock[0] += 2 * STEADY_S

    delays = [seconds_until_restart(stack, clock) for _ in range(2)]

    assert delays == [0, 0]
