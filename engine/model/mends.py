"""Correct what mlx-lm's architectures compute in another way than the model does. The survey finds it and checks it.

A mend changes a loaded model, after its weights have their dtype. It is for settings that published checkpoints use;
the others are refused (surveyed.py). Rotary positions and activations, which many architectures share, have modules
of their own: rope.py, activations.py.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import silu
from mlx.nn.layers.base import Module

from scorepool.engine.model import llama4
from scorepool.engine.model.patch_globals import patch_globals

Config = dict[str, Any]
Mend = Callable[[Any, Config], None]


def apply(model: Any, config: Config) -> None:
    """Apply the mends of the model's type."""
    for mend in _MENDS.get(config["model_type"], ()):
        mend(model, config)


def _scale_keys(model: Any, config: Config) -> None:
    """Apply falcon_h1's key multiplier, which mlx-lm misses because it looks for the keys' weights by a wrong name."""
    for layer in model.layers:
        layer.self_attn.scale *= model.args.key_multiplier


def _scale_embeddings(model: Any, config: Config) -> None:
    """Make gemma3 scale its embeddings in the model's dtype. mlx-lm rounds the scale to bfloat16 in every dtype."""
    backbone = next(module for module in model.modules() if type(module).__name__ == "Gemma3Model")
    patch_globals(model, type(backbone), "mx", bfloat16=backbone.norm.weight.dtype)


class _GroupedNorm(Module):
    """A gated RMS norm of each group of channels alone."""

    def __init__(self, weight: mx.array, eps: float, num_groups: int, *, gates_first: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = weight
        self._eps = eps
        self._num_groups = num_groups
        self._gates_first = gates_first

    def __call__(self, hidden: mx.array, gate: mx.array | None = None) -> mx.array:
        if gate is not None and self._gates_first:
            hidden = silu(gate) * hidden
        grouped = hidden.reshape(*hidden.shape[:-1], self._num_groups, -1)
        hidden = mx.fast.rms_norm(grouped, None, self._eps).reshape(hidden.shape) * self.weight
        return hidden if gate is None or self._gates_first else silu(gate) * hidden


def _group_norms(model: Any, config: Config) -> None:
    """Normalise each group of a Mamba layer's channels alone. mlx-lm normalises them all together."""
    num_groups = config.get("mamba_n_groups") or config.get("n_groups") or 1
    if num_groups == 1:
        return
    for module in model.modules():
        for name, norm in module.children().items():
            if type(norm).__name__ in ("MambaRMSNormGated", "FalconH1RMSNormGated", "GraniteMoeHybridRMSNormGated"):
                eps = getattr(norm, "eps", None) or norm.variance_epsilon
                gates_first = not getattr(norm, "norm_before_gate", False)
                setattr(module, name, _GroupedNorm(norm.weight, eps, num_groups, gates_first=gates_first))


def _end_states_at_lengths(model: Any, config: Config) -> None:
    """Make nemotron_h's recurrent states end where each row of a padded batch does. mlx-lm loses them there."""
    mixers = [module for module in model.modules() if type(module).__name__ == "NemotronHMamba2Mixer"]
    if not mixers:
        return
    kind: Any = type(mixers[0])
    code, globals_ = kind._ssm.__code__, kind._ssm.__globals__

    class Mixer(kind):  # type: ignore[misc]
        def _ssm(self, *args: Any) -> mx.array:
            lengths = None if args[4] is None else args[4].lengths  # of the cache
            update = partial(globals_["ssm_update"], lengths=lengths)
            states: mx.array = FunctionType(code, {**globals_, "ssm_update": update})(self, *args)
            return states

    for mixer in mixers:
        mixer.__class__ = Mixer


def _add_axis_to_masks(model: Any, config: Config) -> None:
    """Let gemma2's attention take the masks of a batch: mlx-lm gives its scores an axis for the key heads."""
    kind: Any = type(model.layers[0].self_attn)

    class Attention(kind):  # type: ignore[misc]
        def __call__(self, hidden: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
            if mask is not None and mask.ndim == 4 and self.repeats > 1:
                mask = mask[:, :, None]
            attended: mx.array = kind.__call__(self, hidden, mask, cache)
            return attended

    for layer in model.layers:
        layer.self_attn.__class__ = Attention


def _give_gemma3n_caches(model: Any, config: Config) -> None:
    """Let gemma3n's later layers attend to the keys of earlier ones. mlx-lm reads them from a cache, or not at all."""
    backbone = model.model.language_model
    kind: Any = type(backbone)

    class LanguageModel(kind):  # type: ignore[misc]
        def __call__(self, inputs: Any = None, cache: Any = None, input_embeddings: Any = None) -> mx.array:
            hidden: mx.array = kind.__call__(self, inputs, cache or self.make_cache(), input_embeddings)
            return hidden

    backbone.__class__ = LanguageModel


def _part_head_of_gemma3n(model: Any, config: Config) -> None:
    """Move gemma3n's head out of its backbone, so that logits are computed for the rows that are asked for only."""
    backbone, whole = model.model.language_model, model.model
    compute_logits, softcap = backbone.embed_tokens.as_linear, backbone.final_logit_softcapping
    embedding_kind: Any = type(backbone.embed_tokens)
    kind: Any = type(whole)

    class Embedding(embedding_kind):  # type: ignore[misc]
        def as_linear(self, hidden: mx.array) -> mx.array:
            return hidden

    class Gemma3n(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            logits: mx.array = compute_logits(kind.__call__(self, *args, **kwargs))
            return logits if softcap is None else mx.tanh(logits / softcap) * softcap

    backbone.embed_tokens.__class__, backbone.final_logit_softcapping = Embedding, None
    whole.__class__ = Gemma3n


def _batch_llama4(model: Any, config: Config) -> None:
    llama4.patch(model, config["text_config"]["rms_norm_eps"])


_MENDS: dict[str, tuple[Mend, ...]] = {
    "falcon_h1": (_scale_keys, _group_norms),
    "gemma2": (_add_axis_to_masks,),
    "gemma3": (_scale_embeddings,),
    "gemma3_text": (_scale_embeddings,),
    "gemma3n": (_give_gemma3n_caches, _part_head_of_gemma3n),
    "granitemoehybrid": (_group_norms,),
    "llama4": (_batch_llama4,),
    "mamba2": (_group_norms,),
    "nemotron_h": (_end_states_at_lengths,),
}
