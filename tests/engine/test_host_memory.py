"""What MLX frees on a CPU is kept for its next arrays, until it is asked back."""

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

# Arrays of 4 to 28 MB, computed as by a worker, whose MLX thread prepares MLX when others run already: page faults of a
# round of all lengths, after a first one, and the resident memory before and after free memory is returned, in pages.
MEASURE = """
import json, resource, threading
from pathlib import Path
from scorepool.engine import mlx_thread
from scorepool.engine.trial import prevent_torch_import
from scorepool.worker import BatchWorker

def compute(mx):
    for millions in range(1, 8):
        array = mx.ones((millions, 1_000_000))
        mx.eval(array + 1, array * 2)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

def measure():
    prevent_torch_import()
    from scorepool.engine.model import products
    products.prepare()
    import mlx.core as mx
    from scorepool.engine.model.memory_budget import return_free_memory

    mx.set_default_device(mx.cpu)
    compute(mx)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    compute(mx)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    kept = resident()
    return_free_memory()
    print(json.dumps({"faults": faults, "returned": kept - resident()}))

threading.Thread(target=threading.Event().wait, daemon=True).start()
mlx_thread.start(measure).wait()
"""
PAGES = 28 * 1_000_000 * 3 * 4 // mmap.PAGESIZE  # of all arrays of a round


def measure(root: Path, **environ: str) -> dict[str, int]:
    """Return the page faults of a round, and the pages that were returned."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=root, env=known | environ, capture_output=True, text=True, check=True
    )
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's arrays are not of the C library")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are not told")
def test_freed_memory_is_kept_until_it_is_returned_unless_the_environment_says_how_memory_is_used(root: Path):
    kept = measure(root)
    assert kept["faults"] < PAGES / 20
    assert kept["returned"] > PAGES / 10  # the arrays of the longest rows
    for chosen in ({"MALLOC_MMAP_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}):
        assert measure(root, **chosen)["faults"] > PAGES / 2
