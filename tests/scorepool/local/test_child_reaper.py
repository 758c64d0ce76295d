import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import subprocess, time
from scorepool.local.child_reaper import ChildReaper
reaper = ChildReaper()
children = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
for child in children:
    reaper.watch(child.pid)
print(*(child.pid for child in children), flush=True)
time.sleep(600)
"""


def has_ended(pid: int) -> bool:
    """True if the process is gone or a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return not state.strip() or state.startswith("Z")


def test_children_end_when_their_parent_is_killed(root: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=root, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not any(has_ended(pid) for pid in pids)
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while not all(has_ended(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
