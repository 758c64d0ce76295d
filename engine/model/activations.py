"""Does the architecture compute the activation that its checkpoint states? Where it does not, it is mended or refused.

Some of mlx-lm's architectures compute one activation, whatever is stated: Pythia's and StarCoder2's checkpoints state
the other GELU of the two, exact and by tanh, and are milli-nats off, silently.
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
_UNSTATED = {  # transformers' defaults, of the architectures that do not compute them
    "gemma": "gelu_pytorch_tanh",
    "gpt_bigcode": "gelu_pytorch_tanh",
    "gpt_neox": "gelu",
    "starcoder2": "gelu_pytorch_tanh",
}


def settle(model: Any, config: Config) -> None:
    """Raises LoadError."""
    text = config.get("text_config") or config
    stated = _stated(text)
    right = _FUNCTIONS.get(stated or "")
    if right is None:
        return
    kinds = {type(module) for module in model.modules()}
    calls = {kind: set(kind.__call__.__code__.co_names) for kind in kinds if isinstance(kind.__call__, FunctionType)}
    with_gelu = {kind: names & _GELUS.keys() for kind, names in calls.items() if names & _GELUS.keys()}
    if not with_gelu and right is not silu and any(names & _SILUS for names in calls.values()):
        raise LoadError(
            f"the configuration's activation is {stated}, and mlx-lm's {config['model_type']} computes silu: "
            "its logprobs would be wrong"
        )
    if len(with_gelu) == 1:
        (kind, names), *_ = with_gelu.items()
        if [_GELUS[name] for name in names] != [right]:
            patch_globals(model, kind, "nn", **dict.fromkeys(_GELUS, right))
            logger.info("the activation of %s was set to the configuration's, %s", config["model_type"], stated)


def _stated(config: Config) -> str | None:
    keys = ("hidden_activation", "hidden_act", "activation_function")
    stated = next((config[key] for key in keys if config.get(key)), None)
    model_type = config.get("model_type")
    if model_type == "gemma" and stated == "gelu":  # what its first release stated, and did not mean
        return _UNSTATED["gemma"]
    return stated or _UNSTATED.get(str(model_type))
