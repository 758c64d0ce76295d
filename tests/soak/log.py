"""What happened, one JSON object a line, in a file: all that the auditor gets to see besides Redis."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Log:
    """Thread-safe. Use as a context; it can be read afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1)

    def write(self, event: str, **about: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "event": event, **about})
        with self._lock:
            self._file.write(line + "\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open() as lines:
            for line in lines:
                yield json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
