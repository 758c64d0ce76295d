"""The errors of the engine.

EngineError
├── LoadError               the model cannot be served; raised by Engine()
├── AdapterError            an adapter cannot be loaded; what is served goes on
├── InvalidRequest          a sequence asks for what the model cannot do; raised by add()
│   └── UnknownAdapter      a sequence names an adapter that is not loaded; ends its group
├── ContextLengthExceeded   a sequence has more tokens than the model's context; raised by add()
│   └── DraftContextExceeded    a prompt of which a part is to be kept has more than the draft model's
├── NonFiniteLogits         the model computed NaN or infinite logits for a sequence; ends its group
├── WeightsReplaced         other weights serve from now on, and a group that reports its steps must begin anew
├── EngineClosed            the engine was closed; ends every group and control message, later calls raise it
└── EngineDeadError         the engine itself failed; as EngineClosed, and the process must end
    └── ReloadError         weights that were dropped cannot be loaded again, or are others now
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MAX_SHOWN = 400  # characters of the text of another library's error


class EngineError(Exception):
    """Base of all errors. `message` is a sentence for the user: what was wrong, where, what would be right.

    `index` is the place in its group of the sequence at which a running group failed.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.index: int | None = None


class LoadError(EngineError):
    pass


class AdapterError(EngineError):
    pass


class InvalidRequest(EngineError):
    pass


class UnknownAdapter(InvalidRequest):
    pass


class ContextLengthExceeded(EngineError):
    """`field` is the part of the request that is too long, if it has several."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class DraftContextExceeded(ContextLengthExceeded):
    pass


class NonFiniteLogits(EngineError):
    pass


class WeightsReplaced(EngineError):
    pass


class EngineClosed(EngineError):
    pass


class EngineDeadError(EngineError):
    pass


class ReloadError(EngineDeadError):
    pass


@contextmanager
def as_load_error(what: str) -> Iterator[None]:
    """Raise every error of other libraries as LoadError. Architectures in mlx-lm raise anything; olmo's exits."""
    try:
        yield
    except (EngineError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise LoadError(f"{what}: {describe(error)}") from error


def first_cause(error: BaseException) -> tuple[BaseException, str]:
    """Return the error that caused this one, and its text in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split()).rstrip(".")
    return error, f"{text[:_MAX_SHOWN]}..." if len(text) > _MAX_SHOWN else text


def describe(error: BaseException) -> str:
    """Describe an error of another library in one line: the cause it names, and the place if the text says little."""
    error, shown = first_cause(error)
    says_enough = bool(shown) and isinstance(error, ValueError | RuntimeError | OSError | ImportError)
    frames = traceback.extract_tb(error.__traceback__)
    if says_enough or not frames:
        return f"{type(error).__name__}: {shown}"
    file = "/".join(Path(frames[-1].filename).parts[-2:])
    return f"{type(error).__name__}{': ' * bool(shown)}{shown} ({file}:{frames[-1].lineno})"
