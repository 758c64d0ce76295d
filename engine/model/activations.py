"""Check that the architecture computes the activation that its checkpoint configures, and patch or refuse it otherwise.

Some of mlx-lm's architectures have one activation in their code and ignore the configuration. The checkpoints of Pythia
and StarCoder2 configure the other of the two GELUs (exact and tanh), and are silently wrong by milli-nats.
"""

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu

from scorepool.engine.errors import LoadError
from scorepool.engine.model.patch_globals import patch_globals

logger = logging.getLogger(__name__)

Config = dict[str, Any]
_FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {  # by transformers' names
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_approx,
    "gelu_fast": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "swish": silu,
}
_GELUS = {"gelu": gelu, "gelu_approx": gelu_approx}  # by the names that architectures call
_SILUS = {"silu", "swiglu"}
_DEFAULTS = {  # transformers' defaults for the architectures that compute something else
    "gemma": "gelu_pytorch_tanh",
    "gpt_bigcode": "gelu_pytorch_tanh",
    "gpt_neox": "gelu",
    "starcoder2": "gelu_pytorch_tanh",
}


def check_or_patch(model: Any, config: Config) -> None:
    """Make the model compute the configured activation; raise LoadError if it cannot."""
    configured = _configured_activation(config.get("text_config") or config)
    expected = _FUNCTIONS.get(configured or "")
    if expected is None:
        return
    kinds = {type(module) for module in model.modules()}
    calls = {kind: set(kind.__call__.__code__.co_names) for kind in kinds if isinstance(kind.__call__, FunctionType)}
    with_gelu = {kind: names & _GELUS.keys() for kind, names in calls.items() if names & _GELUS.keys()}
    if not with_gelu and expected is not silu and any(names & _SILUS for names in calls.values()):
        raise LoadError(
            f"the configuration's activation is {configured}, but mlx-lm's {config['model_type']} computes silu: "
            "its logprobs would be wrong"
        )
    if len(with_gelu) == 1:
        (kind, names), *_ = with_gelu.items()
        if [_GELUS[name] for name in names] != [expected]:
            patch_globals(model, kind, "nn", **dict.fromkeys(_GELUS, expected))
            logger.info("the activation of %s was set to the configuration's, %s", config["model_type"], configured)


def _configured_activation(config: Config) -> str | None:
    """Return the name of the activation, or transformers' default for architectures that need it."""
    keys = ("hidden_activation", "hidden_act", "activation_function")
    configured = next((config[key] for key in keys if config.get(key)), None)
    model_type = config.get("model_type")
    if model_type == "gemma" and configured == "gelu":  # its first release says gelu; the model was trained with tanh
        return _DEFAULTS["gemma"]
    return configured or _DEFAULTS.get(str(model_type))
