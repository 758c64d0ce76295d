"""Which settings of a checkpoint does the engine follow? Changes them one at a time, and compares with transformers."""

from scorepool.engine.model import products

products.prepare()  # before anything imports mlx
