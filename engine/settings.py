"""What an engine is asked to be."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str  # a folder in Hugging Face form, or a hub id
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on a CPU, else the checkpoint's
    mode: Literal["default", "exact"] = "default"  # exact: bit for bit the same in any batch, slower
    max_batch_tokens: int = 2048  # of a step: prompt tokens of its prefill and one per decoding row
    max_running_rows: int = 32  # rows that hold a KV cache between steps
    prefix_cache_bytes: int = 2**30  # of KV caches of prompts that several rows begin with
    memory_bytes: int | None = None  # for weights and caches; None: what the machine has, less a fifth

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be at least 1")
        if self.prefix_cache_bytes < 0:
            raise ValueError(f"prefix_cache_bytes is {self.prefix_cache_bytes}, and must be at least 0")
