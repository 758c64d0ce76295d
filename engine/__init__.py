"""Batched inference as a library: load a model, score, generate, in one continuous batch on one MLX thread.

Importing this package loads no mlx: an `Engine` does, on its own thread, when it is constructed. It knows
nothing of jobs, queues or HTTP.
"""

from engine.engine import Engine
from engine.errors import Closed, EngineError, Fault, LoadError, Numeric, Refused, TooLong
from engine.facts import Facts
from engine.sequence import Sampling, Sequence
from engine.settings import EngineSettings
from engine.tokenizer import Tokenizer

__all__ = [
    "Closed",
    "Engine",
    "EngineError",
    "EngineSettings",
    "Facts",
    "Fault",
    "LoadError",
    "Numeric",
    "Refused",
    "Sampling",
    "Sequence",
    "Tokenizer",
    "TooLong",
]
