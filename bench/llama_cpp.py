"""llama.cpp as a peer, called through llama-cpp-python's functions of its C interface.

It reads GGUF files, which bench/gguf_file.py writes. Both packages are built from source, and installed for this only:

    CMAKE_ARGS=-DGGML_NATIVE=ON .venv/bin/pip install llama-cpp-python gguf
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import gguf_file
from bench.compare import Item, Scores

IS_INSTALLED = all(map(importlib.util.find_spec, ("llama_cpp", "gguf")))
MAX_ROWS = 64  # that are decoded together
_CONTEXT = 8192  # tokens of all rows together


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one or of several rows from a position on, and the positions whose logits are wanted."""

    rows: list[int]
    tokens: list[int]
    first: int
    wanted: Sequence[int] = ()


class LlamaCpp:
    """One model and one context of llama.cpp. `rows_at_once` rows are decoded together; keys and values are float32."""

    def __init__(self, folder: Path, rows_at_once: int, bits: int = 32) -> None:
        import llama_cpp  # type: ignore[import-not-found] # here: it is installed for this peer only

        self._lib = llama_cpp
        self._rows_at_once = min(rows_at_once, MAX_ROWS)
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = llama_cpp.llama_model_load_from_file(
            str(gguf_file.write(folder, bits)).encode(), llama_cpp.llama_model_default_params()
        )
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = _CONTEXT, _CONTEXT, 512
        parameters.n_seq_max, parameters.kv_unified = self._rows_at_once, True
        parameters.n_threads = parameters.n_threads_batch = int(
            os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1
        )
        parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(_CONTEXT, 0, self._rows_at_once)

    def __call__(self, items: list[Item]) -> Scores:
        """Score completions. A prompt that rows share is computed once, and its keys and values are used by all."""
        scores: Scores = []
        for start in range(0, len(items), self._rows_at_once):
            scores += self._score(items[start : start + self._rows_at_once])
        return scores

    def generate(
        self, prompts: Sequence[list[int]], max_tokens: int, on_step: Callable[[], None] = lambda: None
    ) -> list[list[int]]:
        """Return the greedy tokens of all prompts, which are decoded together. Calls `on_step` after each token."""
        self._clear()
        spans = [Span([row], prompt, 0, [len(prompt) - 1]) for row, prompt in enumerate(prompts)]
        answers: list[list[int]] = [[] for _ in prompts]
        for step in range(max_tokens):
            tokens = [int(logits.argmax()) for logits in self._decode(spans)]
            for answer, token in zip(answers, tokens, strict=True):
                answer.append(token)
            on_step()
            ends = [len(prompt) + step for prompt in prompts]
            spans = [
                Span([row], [token], end, [end]) for row, (token, end) in enumerate(zip(tokens, ends, strict=True))
            ]
        return answers

    def _score(self, items: list[Item]) -> Scores:
        self._clear()
        is_shared = len(items) > 1 and all(item.prompt == items[0].prompt for item in items)
        num_shared = len(items[0].prompt) - 1 if is_shared else 0
        if is_shared:
            self._decode([Span(list(range(len(items))), items[0].prompt[:-1], 0)])
        spans = []
        for row, item in enumerate(items):
            tokens = (item.prompt + item.completion)[:-1]
            wanted = range(len(item.prompt) - 1, len(tokens))
            spans.append(Span([row], tokens[num_shared:], num_shared, wanted))
        logits = self._decode(spans)
        return [[_logprob(next(logits), token) for token in item.completion] for item in items]

    def _clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _decode(self, spans: Sequence[Span]) -> Iterator[Any]:
        """Run tokens of rows; return the wanted logits in order, which the next call overwrites."""
        batch, wanted = self._batch, []
        cells = [(span, at, token) for span in spans for at, token in enumerate(span.tokens, span.first)]
        for index, (span, position, token) in enumerate(cells):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, len(span.rows)
            for number, row in enumerate(span.rows):
                batch.seq_id[index][number] = row
            batch.logits[index] = position in span.wanted
            wanted += [index] if position in span.wanted else []
        batch.n_tokens = len(cells)
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp has no place for {len(cells)} tokens")
        pointers = (self._lib.llama_get_logits_ith(self._context, index) for index in wanted)
        return (np.ctypeslib.as_array(pointer, shape=(self._vocab_size,)) for pointer in pointers)


def _logprob(logits: Any, token: int) -> float:
    largest = logits.max()
    return float(logits[token] - largest - np.log(np.exp(logits - largest).sum()))
