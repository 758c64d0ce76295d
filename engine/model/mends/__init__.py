"""Correct what mlx-lm's architectures compute in another way than the model does. The survey finds it and checks it.

A mend changes a loaded model, after its weights have their dtype. It is for settings that published checkpoints use;
the others are refused (surveyed.py). Rotary positions and activations, which many architectures share, have modules
of their own: rope.py, activations.py.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from scorepool.engine.model.mends import (
    attention,
    constants,
    experts,
    gemma,
    gpt_oss,
    llama4,
    norms,
    positions,
    recurrent,
)

Config = dict[str, Any]
Mend = Callable[[Any, Config], None]


def apply(model: Any, config: Config, stored: dict[str, mx.array]) -> None:
    """Apply the mends of the model's code and type. `stored` has the checkpoint's tensors by name."""
    norms.set_epsilons(model, config)
    experts.mend_routers(model, config, stored)
    for mend in _MENDS.get(config["model_type"], ()):
        mend(model, config)


_MENDS: dict[str, tuple[Mend, ...]] = {
    "cohere2": (attention.rotate_sliding_layers,),
    "exaone4": (attention.rotate_sliding_layers,),
    "falcon_h1": (
        recurrent.scale_keys,
        recurrent.scale_values_and_biases,
        recurrent.limit_time_steps,
        recurrent.group_norms,
    ),
    "gemma2": (gemma.add_axis_to_masks,),
    "gemma3": (gemma.scale_embeddings,),
    "gemma3_text": (gemma.scale_embeddings,),
    "gemma3n": (gemma.give_gemma3n_caches, gemma.part_head_of_gemma3n),
    "gpt2": (positions.place_rows, attention.scale_scores),
    "gpt_bigcode": (positions.place_rows, attention.scale_scores, attention.group_rows_by_kind),
    "gpt_oss": (gpt_oss.limit_swiglu,),
    "granitemoehybrid": (recurrent.group_norms, positions.remove_unconfigured_rope),
    "kimi_k3": (experts.choose_groups_of_kimi_k3,),
    "llama4": (llama4.mask_chunks,),
    "llama4_text": (llama4.mask_chunks,),
    "mamba2": (recurrent.group_norms,),
    "mimo_v2_flash": (attention.widen_window,),
    "minicpm3": (constants.scale_tied_head, attention.scale_scores_by_context),
    "nanochat": (constants.set_epsilon_of_nanochat,),
    "nemotron_h": (recurrent.limit_time_steps, recurrent.end_states_at_lengths),
    "olmoe": (attention.clip_projections,),
    "youtu_llm": (attention.scale_scores_by_context,),
}
