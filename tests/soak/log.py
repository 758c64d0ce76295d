"""What happened, one JSON object a line, in a file: all that the auditor gets to see besides Redis."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Log:
    """Thread-safe."""

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

    def close(self) -> None:
        self._file.close()
