"""Check that the architecture computes the activation that its checkpoint configures, and patch or refuse it otherwise.

mlx-lm's architectures have one activation in their code and ignore the configured name. Checkpoints of Pythia,
StarCoder2 and Cerebras-GPT configure the other of the two GELUs (exact and tanh), and would be silently wrong by
milli-nats.

To add an architecture whose code computes another activation than SiLU, name it in one of the tables below.
"""

import logging
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, gelu_fast_approx, relu, relu2, silu
from mlx_lm.utils import MODEL_REMAPPING

from scorepool.engine.errors import LoadError
from scorepool.engine.model.patch_globals import patch_globals
from scorepool.engine.model.surveyed import default_settings

logger = logging.getLogger(__name__)

Config = dict[str, Any]

_TANH_GELU = "gelu_pytorch_tanh"
_FUNCTIONS: dict[str, Callable[[mx.array], mx.array]] = {  # by transformers' names
    **dict.fromkeys(("gelu", "gelu_python"), gelu),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", _TANH_GELU), gelu_approx),
    **dict.fromkeys(("silu", "swish"), silu),
    "quick_gelu": gelu_fast_approx,
    "relu": relu,
    "relu2": relu2,
}
_GELUS = {"gelu": gelu, "gelu_approx": gelu_approx}  # by the names that architectures call

# Tables by the architecture's name in mlx-lm.
REPLACEABLE = {  # their layers themselves call one of _GELUS, in whose place any of _FUNCTIONS can be put
    *("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "phi"),
    *("recurrent_gemma", "starcoder2"),
}
COMPUTED = {  # what the others compute, where it is not SiLU
    "apertus": "xielu",
    "bitnet": "relu2",
    "gemma3n": _TANH_GELU,
    "gemma4": _TANH_GELU,
    "gemma4_text": _TANH_GELU,
    "kimi_k3": "situ",
    "nanochat": "relu2",
    "nemotron": "relu2",
    "nemotron_h": "relu2",
    "phi3small": "gegelu",
    "phixtral": _TANH_GELU,
    "rwkv7": "sqrelu",
    "spark2_5": "gelu",
}
UNCHECKED = {  # they read the name and refuse those that they do not know, or transformers ignores it too
    *("gear", "nemotron-nas"),
    *("gpt_oss", "lfm2", "lfm2-vl", "lfm2_moe", "minimax_m3_vl"),
}
_STATE_SPACE_KEY = "mamba_hidden_act"  # nemotron_h's other activation; SiLU in its code
_KEYS = (
    *("hidden_act", "hidden_activation", "activation_function", "activation_fn_name", "mlp_hidden_act"),
    _STATE_SPACE_KEY,
)


def check(config: Config) -> None:
    """Raise LoadError for a configured activation that the architecture does not compute and that `patch` cannot set.

    `config` has transformers' default for each setting that config.json leaves out.
    """
    architecture = _architecture(config)
    if architecture in UNCHECKED:
        return
    for key, configured in _configured(config):
        if architecture in REPLACEABLE:
            expected = tuple(_FUNCTIONS)
        else:
            computed = "silu" if key == _STATE_SPACE_KEY else COMPUTED.get(architecture, "silu")
            expected = (computed, *(name for name in _FUNCTIONS if _FUNCTIONS[name] is _FUNCTIONS.get(computed)))
        if configured not in expected:
            raise LoadError(
                f"config.json: {key} is {configured!r}, which mlx-lm's {config['model_type']} does not compute: "
                f"its logprobs would be wrong; expected {' or '.join(dict.fromkeys(expected))}"
            )


def patch(model: Any, config: Config) -> None:
    """Make the model compute the configured activation, which `check` accepted."""
    if _architecture(config) not in REPLACEABLE:
        return
    for _, configured in _configured(config):
        function = _FUNCTIONS[configured]
        kinds = {type(module) for module in model.modules()}
        calls = {
            kind: set(kind.__call__.__code__.co_names) for kind in kinds if isinstance(kind.__call__, FunctionType)
        }
        for kind, names in calls.items():
            if any(_GELUS[name] is not function for name in names & _GELUS.keys()):
                patch_globals(model, kind, "nn", **dict.fromkeys(_GELUS, function))
                logger.info("the activation of %s's %s was set to %s", config["model_type"], kind.__name__, configured)


def _architecture(config: Config) -> str:
    """Return mlx-lm's name of the model type."""
    model_type = config["model_type"]
    return str(MODEL_REMAPPING.get(model_type, model_type))


def _configured(config: Config) -> Iterator[tuple[str, str]]:
    """Yield key and name of each activation that transformers reads; of each that there is, if it lacks the type."""
    known = default_settings(config)
    is_nested = isinstance(config.get("text_config"), dict)
    section = config["text_config"] if is_nested else config
    for key in _KEYS:
        if (not known or key in known) and section.get(key) is not None:
            name = section[key]
            if config["model_type"] == "gemma" and name == "gelu":
                name = _TANH_GELU  # the first release says gelu; transformers computes what it was trained with
            yield f"text_config.{key}" if is_nested else key, str(name)
    function = (section.get("ffn_config") or {}).get("ffn_act_fn") or {}  # dbrx's
    if "name" in function:
        yield "ffn_config.ffn_act_fn.name", str(function["name"])
