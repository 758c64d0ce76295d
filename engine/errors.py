"""What the engine raises.

EngineError
├── LoadError   the model cannot be served; raised by Engine()
├── Refused     the rows ask for what the model cannot do; raised by add()
├── TooLong     more tokens than the model's context; raised by add()
├── Numeric     the model computed NaN or infinite logits for a row; ends that row's group
├── Closed      the engine was closed; ends every group, and add() raises it from then on
└── Fault       the engine itself failed; ends every group, add() raises it from then on: end the process
"""


class EngineError(Exception):
    """`message` is a sentence for the user: what was wrong, where, what would be right."""

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
