"""A Mac is kept awake while there is work, and only then. With a fake `caffeinate`: not run on a Mac."""

import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis import Redis

from scorepool.worker.machine import keep_awake
from scorepool.worker.machine.keep_awake import LINGER_S, KeepAwake
from tests.worker.conftest import Workers, generate, submit, until

LOG = logging.getLogger("scorepool.test")


class Mac:
    """A machine with work or without, a clock, and a caffeinate that notes its arguments and its process id."""

    def __init__(self, folder: Path) -> None:
        self.has_work = False
        self.now_s = 1000.0
        self.notes = folder / "notes"
        program = folder / "caffeinate"
        program.write_text(f'#!/bin/sh\necho "$$ $*" >> {self.notes}\nexec sleep 60\n')
        program.chmod(0o755)

    def started(self) -> list[list[str]]:
        return [line.split() for line in self.notes.read_text().splitlines()] if self.notes.exists() else []


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    mac = Mac(tmp_path)
    monkeypatch.setattr(keep_awake, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(keep_awake, "awake_s", lambda: mac.now_s)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return mac


def lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_kept_awake_from_the_first_job_until_a_while_after_the_last(mac: Mac):
    keeper = KeepAwake(lambda: mac.has_work, LOG)
    keeper.update()
    assert mac.started() == []

    mac.has_work = True
    keeper.update()
    keeper.update()
    until(mac.started)
    [[pid, *options]] = mac.started()
    assert options == ["-i", "-w", str(os.getpid())]

    mac.has_work = False
    mac.now_s += LINGER_S - 1
    keeper.update()
    assert lives(pid)
    mac.now_s += 1
    keeper.update()
    assert not lives(pid)

    mac.has_work = True
    keeper.update()
    until(lambda: len(mac.started()) == 2)
    keeper.end()
    assert not lives(mac.started()[1][0])


def test_a_caffeinate_that_was_ended_is_started_again(mac: Mac):
    mac.has_work = True
    keeper = KeepAwake(lambda: mac.has_work, LOG)
    keeper.update()
    assert keeper._process is not None
    keeper._process.kill()
    keeper._process.wait()
    keeper.update()
    assert keeper._process.poll() is None
    keeper.end()


def test_without_caffeinate_one_line_says_that_the_mac_may_sleep(
    mac: Mac, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("PATH", "")
    mac.has_work = True
    keeper = KeepAwake(lambda: mac.has_work, LOG)
    for _ in range(3):
        keeper.update()
    assert caplog.text.count("this Mac may sleep while it works") == 1


def test_a_worker_keeps_its_mac_awake_until_it_ends(redis: Redis, workers: Workers, mac: Mac):
    worker = workers.start(worker="MacWorker")
    until(lambda: redis.keys("scorepool:card:*"))
    time.sleep(1.5)  # longer than between two looks for work
    assert mac.started() == []
    submit(redis, generate(max_tokens=800))
    until(mac.started)
    [[pid, *options]] = mac.started()
    assert options == ["-i", "-w", str(worker.pid)]
    worker.terminate()
    worker.wait(60)
    assert not lives(pid)


def test_other_systems_start_nothing(mac: Mac, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keep_awake, "sys", SimpleNamespace(platform="linux"))
    mac.has_work = True
    keeper = KeepAwake(lambda: mac.has_work, LOG)
    keeper.update()
    assert keeper._process is None
