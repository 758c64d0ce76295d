"""Batched inference as a library: load a model, score, generate, in one continuous batch on one MLX thread.

Importing this package does not load mlx: an `Engine` loads it on its own thread when it is constructed. The import asks
the C library to keep the memory that MLX frees on a CPU, for the whole process (`host_memory`). The package knows
nothing of jobs, queues or HTTP.
"""

from scorepool.engine import host_memory
from scorepool.engine.adapter import Adapter
from scorepool.engine.control import SetBudget
from scorepool.engine.engine import Engine
from scorepool.engine.engines import open_engines
from scorepool.engine.errors import (
    AdapterError,
    ContextLengthExceeded,
    DraftContextExceeded,
    EngineClosed,
    EngineDeadError,
    EngineError,
    InvalidRequest,
    LoadError,
    NonFiniteLogits,
    ReloadError,
    UnknownAdapter,
    WeightsReplaced,
)
from scorepool.engine.model_info import Classifier, ModelInfo, Pooling, Verification
from scorepool.engine.scheduling.stats import EngineStats
from scorepool.engine.sequence import Sampling, Sequence, Share, Targets, TokenColumns
from scorepool.engine.settings import EngineSettings
from scorepool.engine.text.chat.call_formats.formats import REASONING_PARSERS, TOOL_PARSERS
from scorepool.engine.text.chat.codec import ChatCodec
from scorepool.engine.text.tokenizer import Tokenizer

host_memory.keep_freed()  # a worker has threads before it constructs an engine

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Adapter",
    "AdapterError",
    "ChatCodec",
    "Classifier",
    "ContextLengthExceeded",
    "DraftContextExceeded",
    "Engine",
    "EngineClosed",
    "EngineDeadError",
    "EngineError",
    "EngineSettings",
    "EngineStats",
    "InvalidRequest",
    "LoadError",
    "ModelInfo",
    "NonFiniteLogits",
    "Pooling",
    "ReloadError",
    "Sampling",
    "Sequence",
    "SetBudget",
    "Share",
    "Targets",
    "TokenColumns",
    "Tokenizer",
    "UnknownAdapter",
    "Verification",
    "WeightsReplaced",
    "open_engines",
]
