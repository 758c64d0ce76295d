"""A rank whose mlx.launch has ended stops as at SIGTERM."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.conftest import until

RANK = """
import logging, pathlib, signal, sys, time
from scorepool.worker.machine.launcher import Launcher
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append("SIGTERM"))
launcher = Launcher(lambda: sys.argv[2] == "stopping", logging.getLogger())
launcher.check()
pathlib.Path(sys.argv[1] + ".ready").write_text(str(len(told)))
before = launcher._pid
while launcher._pid == before:
    launcher.check()
    time.sleep(0.01)
launcher.check()
pathlib.Path(sys.argv[1] + ".part").write_text(" ".join(["end", *told]))
pathlib.Path(sys.argv[1] + ".part").rename(sys.argv[1])
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(("state", "told"), [("running", "end SIGTERM"), ("stopping", "end")])
def test_a_rank_stops_once_with_its_launcher(state: str, told: str, tmp_path: Path):
    out = tmp_path / "out"
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK, str(out), state])
    until(lambda: Path(f"{out}.ready").exists(), 60)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    until(out.exists, 60)
    assert out.read_text() == told
