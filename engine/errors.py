"""The errors of the engine.

EngineError
├── LoadError               the model cannot be served; raised by Engine()
├── InvalidRequest          a sequence asks for what the model cannot do; raised by add()
├── ContextLengthExceeded   a sequence has more tokens than the model's context; raised by add()
├── NonFiniteLogits         the model computed NaN or infinite logits for a sequence; ends its group
├── EngineClosed            the engine was closed; ends every group and control message, later calls raise it
└── EngineDeadError         the engine itself failed; as EngineClosed, and the process must end
"""


class EngineError(Exception):
    """Base of all errors. `message` is a sentence for the user: what was wrong, where, what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class LoadError(EngineError):
    pass


class InvalidRequest(EngineError):
    pass


class ContextLengthExceeded(EngineError):
    pass


class NonFiniteLogits(EngineError):
    pass


class EngineClosed(EngineError):
    pass


class EngineDeadError(EngineError):
    pass
