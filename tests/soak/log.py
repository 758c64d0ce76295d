"""A log of events, one JSON object per line. The auditor reads only such logs and Redis."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class Log:
    """A thread-safe context manager that appends events to a file. It can be read after it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._file = path.open("a", buffering=1)

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"at": round(time.time(), 3), "event": event, **fields})
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
