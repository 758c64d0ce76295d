"""The memory of this machine, or of the container (Linux's cgroup) that the process runs in."""

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def machine_memory_bytes() -> int:
    """Return the memory that the processes of this machine or container may use together."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([total, *_cgroup_limits()])


def _cgroup_limits() -> list[int]:
    """Return the limits of this process's cgroup and of those above it, versions 1 and 2. None on other systems."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    files = [CGROUPS / "memory.max", CGROUPS / "memory" / "memory.limit_in_bytes"]
    for line in lines:  # hierarchy:controllers:/path
        _, controllers, path = line.split(":", 2)
        folder = CGROUPS if not controllers else CGROUPS / "memory" if "memory" in controllers.split(",") else None
        while folder and path.strip("/"):
            files.append(folder / path.strip("/") / ("memory.limit_in_bytes" if controllers else "memory.max"))
            path = path.rpartition("/")[0]
    return [limit for file in files if (limit := _read_limit(file))]


def _read_limit(file: Path) -> int:
    """Return the limit in bytes; 0 if there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such cgroup, or `max`
        return 0
