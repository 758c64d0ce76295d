"""Change what global names mean in the code of one loaded model's layers. mlx-lm's own classes stay as they are."""

from types import FunctionType, SimpleNamespace
from typing import Any


def patch_globals(model: Any, kind: type, name: str, **replacements: object) -> None:
    """Replace attributes of the global module `name` in `kind.__call__`, for this model's modules of exactly `kind`.

    `name` is a module that the code of `kind` imports, such as `nn`: `patch_globals(model, MLP, "nn", gelu=relu)`
    makes `nn.gelu` mean `relu` there.
    """
    call: Any = kind.__call__
    patched_module = SimpleNamespace(**{**vars(call.__globals__[name]), **replacements})
    replace_globals(model, kind, **{name: patched_module})


def replace_globals(model: Any, kind: type, **replacements: object) -> None:
    """Replace what global names mean in `kind.__call__`, for this model's modules of exactly `kind`."""
    call: Any = kind.__call__
    globals_ = {**call.__globals__, **replacements}
    patched_call = FunctionType(call.__code__, globals_, call.__name__, call.__defaults__, call.__closure__)
    patched_call.__kwdefaults__ = call.__kwdefaults__
    subclass = type(kind.__name__, (kind,), {"__call__": patched_call})
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = subclass
