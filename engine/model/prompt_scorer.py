"""Say which tokens of a prompt matter: how much the draft model's last tokens attend to each.

The draft model runs the whole prompt, which costs little as it is small. In its last chunk, the queries of the last
WINDOW tokens are recorded in every layer, with all keys:

    weights     softmax of queries and keys     [heads, WINDOW, tokens]
    of a layer  mean over the window, then the largest of all heads
    of a token  the largest of all layers
"""

from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx

from scorepool.engine.errors import describe
from scorepool.engine.model import kv_cache
from scorepool.engine.model.backbone import BackboneAndHead
from scorepool.engine.model.kv_cache import Cache
from scorepool.engine.model.patch_globals import replace_globals

WINDOW = 16  # tokens at the end of a prompt whose attention says what matters
MAX_CHUNK = 256  # tokens of a prompt in one forward pass
_ATTENTION = "scaled_dot_product_attention"
_NUM_TRIED = 2 * WINDOW


@dataclass(slots=True, eq=False)
class PromptRun:
    """A prompt, and what the draft model has computed of it."""

    token_ids: list[int]
    cache: Cache
    num_done: int = field(default=0)


class PromptScorer:
    """The draft model as a reader of prompts. Must be used on the MLX thread."""

    def __init__(self, model: Any, split: BackboneAndHead, context_length: int) -> None:
        """Start to record the attention of the model. `fault` says why that is not possible; None: it is."""
        self.context_length = context_length
        self._model = model
        self._split = split
        self._is_recording = False
        self._recorded: list[mx.array] = []  # [tokens] of each layer
        for kind in {type(module) for module in model.modules()}:
            call = kind.__call__
            if not isinstance(call, FunctionType) or _ATTENTION not in call.__code__.co_names:
                continue
            if _ATTENTION in call.__globals__:
                attend = partial(self._attend, call.__globals__[_ATTENTION])
                replace_globals(model, kind, **{_ATTENTION: attend})
        self.fault = self._find_fault()

    def begin(self, token_ids: list[int]) -> PromptRun:
        """Return a run of a prompt, nothing of which was computed."""
        return PromptRun(list(token_ids), kv_cache.new(self._model))

    def advance(self, run: PromptRun) -> list[float] | None:
        """Compute the next chunk of a run. Return a score for each token after the last one. Waits for it."""
        num_left = len(run.token_ids) - run.num_done
        size = min(MAX_CHUNK, num_left)
        if 0 < num_left - size < WINDOW:
            size -= WINDOW
        self._is_recording = size == num_left
        chunk = run.token_ids[run.num_done : run.num_done + size]
        try:
            self._split.forward_hidden(mx.array([chunk]), run.cache)
        finally:
            self._is_recording = False
            recorded, self._recorded = self._recorded, []
        run.num_done += size
        if size < num_left:
            mx.eval(kv_cache.arrays(run.cache))
            return None
        scores: list[float] = mx.stack(recorded).max(axis=0).tolist()  # type: ignore[assignment]
        return scores

    def _find_fault(self) -> str | None:
        """Score a few tokens."""
        try:
            run = self.begin([0] * _NUM_TRIED)
            recorded: list[mx.array] = []
            self._is_recording = True
            self._split.forward_hidden(mx.array([run.token_ids]), run.cache)
            recorded, self._recorded = self._recorded, []
            is_whole = len(recorded) == len(run.cache) and all(one.shape == (_NUM_TRIED,) for one in recorded)
            if is_whole and bool(mx.isfinite(mx.stack(recorded)).all().item()):
                return None
        except Exception as error:  # any: the architecture's own code
            return f"the attention of the draft model cannot be read: {describe(error)}"
        finally:
            self._is_recording = False
        return "the attention of the draft model cannot be read in every layer"

    def _attend(
        self, original: Any, queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_recording:
            scale = kwargs["scale"] if "scale" in kwargs else args[1]
            self._recorded.append(_importance(queries[:, :, -WINDOW:], keys, scale))
        return original(queries, keys, values, *args, **kwargs)


def _importance(queries: mx.array, keys: mx.array, scale: float) -> mx.array:
    """Return [tokens]: the attention to each key, of queries [1, heads, window, width] that are the last tokens'."""
    _, num_heads, window, width = queries.shape
    _, num_groups, num_tokens, _ = keys.shape
    grouped = (queries.astype(mx.float32) * scale).reshape(num_groups, -1, width)  # heads of a group are adjacent
    products = grouped @ keys[0].astype(mx.float32).swapaxes(-1, -2)
    products = products.reshape(num_heads, window, num_tokens)
    is_later = mx.arange(num_tokens)[None] > mx.arange(num_tokens - window, num_tokens)[:, None]
    weights = mx.softmax(mx.where(is_later, -mx.inf, products), axis=-1)
    return weights.mean(axis=1).max(axis=0)
