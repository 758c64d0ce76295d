"""One format for the log lines of every process: time, level, process, and the model, worker and job that it is about.

    logs.configure("worker", settings.log_format, settings.log_level, worker="mac")    once, when a process starts
    with logs.about(job=job.id): ...                              the lines of this thread or task inside the block
    log.warning("...", extra={"job": job.id})                     one line

To add a field: its name in FIELDS.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, NoReturn

LogFormat = Literal["text", "json"]
FIELDS = ("model", "worker", "job")
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
ESCAPES = CONTROL | {0x2028: "\\u2028", 0x2029: "\\u2029"}  # these are shown as a new line by some viewers
COLOR = re.compile("\x1b\\[[0-9;]*m")  # RQ colors its messages on a terminal

_about: ContextVar[Mapping[str, str]] = ContextVar("about", default={})  # noqa: B039 - a Mapping is not changed


@contextmanager
def about(**fields: str) -> Iterator[None]:
    """Give every line of this thread or task inside the block these fields."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def set_about(**fields: str) -> None:
    """Give every later line of this task these fields. For a task that ends with what it is about, as a request's."""
    _about.set({**_about.get(), **fields})


class _Formatter(logging.Formatter):
    """Find the fields of a record: those of the line, of its thread or task, of the process."""

    def __init__(self, process: str, fields: Mapping[str, str]) -> None:
        super().__init__()
        self._process = process
        self._fields = dict(fields)

    def head(self, record: logging.LogRecord) -> dict[str, str]:
        """Return everything but the message, in the order of a line."""
        known = {
            **self._fields,
            **_about.get(),
            **{name: record.__dict__[name] for name in FIELDS if name in vars(record)},
        }
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return {
            "time": at.replace("+00:00", "Z"),  # UTC, so that the lines of several machines can be merged
            "level": record.levelname,
            "process": f"{self._process}[{os.getpid()}]",
            **{name: str(known[name]) for name in FIELDS if known.get(name)},
        }

    def message(self, record: logging.LogRecord) -> str:
        """Return the message without colors and without what the head says."""
        message = COLOR.sub("", record.getMessage())
        return message.removeprefix(f"Worker {self._fields.get('worker')}: ")  # of RQ's lines

    def traceback(self, record: logging.LogRecord) -> str:
        """Return the traceback, or an empty string."""
        exception = self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""
        return "\n".join(filter(None, (exception, record.stack_info)))


class TextFormatter(_Formatter):
    """Write a line for people. Further lines of a message are indented, so that none looks like a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        head = self.head(record)
        first = f"{head.pop('time')} {head.pop('level')} {head.pop('process')}"
        fields = "".join(f" {name}={value}" for name, value in head.items())
        text = "\n".join(filter(None, (f"{first}{fields}: {self.message(record)}", self.traceback(record))))
        if text.isprintable():  # as most are: looking at each character takes longer than the rest
            return text
        return text.translate(ESCAPES).replace("\n", "\n    ")


class JsonFormatter(_Formatter):
    """Write a line of JSON for programs."""

    def format(self, record: logging.LogRecord) -> str:
        line = self.head(record) | {"logger": record.name, "message": self.message(record)}
        if traceback := self.traceback(record):
            line["traceback"] = traceback
        return json.dumps(line)


def configure(process: str, log_format: LogFormat, level: str, **fields: str) -> None:
    """Send the lines of every library to stderr in our format, and ours from `level` on. Later calls replace earlier.

    Libraries have the levels that they were given, WARNING by default: at DEBUG each would print all its lines.
    """
    formatter = (JsonFormatter if log_format == "json" else TextFormatter)(process, fields)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in ("rq", "scorepool", "uvicorn"):
            logger.handlers.clear()
            logger.propagate = True
    logging.root.handlers = [one for one in logging.root.handlers if not isinstance(one.formatter, _Formatter)]
    logging.root.addHandler(handler)
    logging.getLogger("scorepool").setLevel(level)
    logging.captureWarnings(True)
    sys.excepthook = _log_exception


def _log_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Log what ends the process, as a last line in the format of the others."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger(__name__).critical("the process ends", exc_info=(kind, error, traceback))


def wants_json() -> bool:
    """True if the environment asks for lines of JSON, also before the settings are read."""
    return os.environ.get("SCOREPOOL_LOG_FORMAT", "").lower() == "json"


def end_process(message: str, process: str = "scorepool") -> NoReturn:
    """End the process with one sentence as its last line, and exit status 1. `process` names one without `configure`.

    A process that ends before it has read its settings logs in the format that its environment asks for.
    """
    formatters = [handler.formatter for handler in logging.root.handlers]
    if wants_json() and not any(isinstance(formatter, JsonFormatter) for formatter in formatters):
        configure(process, "json", "INFO")
    if wants_json() or any(isinstance(formatter, JsonFormatter) for formatter in formatters):
        logging.getLogger(__name__).critical("%s", message)
        raise SystemExit(1)
    raise SystemExit(f"scorepool: {message}")
