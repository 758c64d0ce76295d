import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import subprocess, sys, time
from client.tether import Tether
tether = Tether()
children = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
for child in children:
    tether.watch(child.pid)
if sys.argv[1] == "reap":
    children[0].kill(); children[0].wait(); tether.reaped(children[0].pid)
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """A zombie that init has not reaped yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_children_end_when_their_parent_is_killed(root: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, "keep"], cwd=root, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not any(gone(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
