"""One loaded model's own copy of a class, whose code finds other things under global names. mlx-lm's stays as it is."""

from types import FunctionType, SimpleNamespace
from typing import Any


def patch_globals(model: Any, kind: type, name: str, **meanings: object) -> None:
    """In the model's modules of this very kind, `name.attribute` means `meanings[attribute]` in `__call__`.

    `name` is a module that the code of `kind` imports, such as `nn`.
    """
    call: Any = kind.__call__
    spelled = SimpleNamespace(**{**vars(call.__globals__[name]), **meanings})
    globals_ = {**call.__globals__, name: spelled}
    respelled = FunctionType(call.__code__, globals_, call.__name__, call.__defaults__, call.__closure__)
    respelled.__kwdefaults__ = call.__kwdefaults__
    subclass = type(kind.__name__, (kind,), {"__call__": respelled})
    for module in model.modules():
        if type(module) is kind:
            module.__class__ = subclass
