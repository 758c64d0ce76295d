"""Ours beside its peers: one runnable comparison a file, `python -m bench.NAME` from the checkout."""

import os

from scorepool.engine.model import blas

blas.load()  # before anything imports mlx; the peers that run on it compute with the same one
os.environ.setdefault("TQDM_DISABLE", "1")  # peers' progress bars, which would stand between the figures
