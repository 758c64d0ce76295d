"""Try to load a model in a process of its own first, so that a crash of native code is an error here.

An index out of bounds in MLX, for one, ends a process without a Python exception. A load that ended well leaves a mark,
and the next load of the same checkpoint with the same settings and versions needs no trial. The mark is gone while the
model loads: if that ends the process after all, the next load is on trial again, and a supervisor that restarts the
process meets a LoadError instead of the same crash for ever.

    Engine ── Trial ──► python -m scorepool.engine: exits, or prints the reason of a LoadError, or crashes
"""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

from scorepool.engine.errors import LoadError
from scorepool.engine.local_folder import find_local_folder
from scorepool.engine.settings import EngineSettings
from scorepool.engine.versions import installed_version

log = logging.getLogger(__name__)

_PACKAGES = ("scorepool", "mlx", "mlx-lm", "transformers")
_FILES = ("config.json", "model*.safetensors")


class Trial:
    """A context in which a model is loaded. Entering starts the trial if one is needed; leaving it marks the load.

    Entering raises LoadError if there is no such folder.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._child: subprocess.Popen[str] | None = None
        name = sha256(f"{settings.model} {settings.dtype} {settings.mode}".encode()).hexdigest()[:16]
        self._mark = Path(settings.load_marks) / name if settings.tries_load and settings.load_marks else None
        self._state = _describe_state(settings)

    def __enter__(self) -> Self:
        find_local_folder(self._settings.model)  # a wrong path needs no trial
        if self._settings.tries_load and not self._take_mark():
            log.info("trying to load %s in a process of its own", self._settings.model)
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", "scorepool.engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
            self._child.communicate()
        if error is None and self._mark is not None:
            try:
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.write_text(self._state)
            except OSError as failure:
                log.info("the next load is on trial again: %s", failure)

    def wait(self) -> None:
        """Wait for the outcome. Raises LoadError if the model cannot be loaded."""
        if self._child is None:
            return
        order = {"parent": os.getpid(), "settings": asdict(self._settings)}
        reason, errors = self._child.communicate(json.dumps(order))
        status = self._child.returncode
        if status == 0 and not reason:
            return
        if status == 0:
            raise LoadError(json.loads(reason))
        ended = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        last_words = next((f": {line.strip()}" for line in reversed(errors.splitlines()) if line.strip()), "")
        raise LoadError(
            f"the model {self._settings.model!r} cannot be loaded: a process that tried it {ended}{last_words}"
        )

    def _take_mark(self) -> bool:
        """Remove the mark of the last load, and return whether it was of the same state."""
        if self._mark is None:
            return False
        try:
            is_known = self._mark.read_text() == self._state
            self._mark.unlink()
        except OSError:
            return False
        return is_known


def _describe_state(settings: EngineSettings) -> str:
    """Describe what decides about a crash: settings, versions, and the files of a local checkpoint."""
    folder = Path(settings.model).expanduser()
    files = sorted(path for pattern in _FILES for path in folder.glob(pattern)) if folder.is_dir() else []
    stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    versions = {name: installed_version(name) for name in _PACKAGES} | {"python": sys.version}
    deciding = replace(settings, load_marks=None, memory_bytes=None, prefix_cache_bytes=0)
    return json.dumps([asdict(deciding), versions, stats])


def prevent_torch_import() -> None:
    """Keep transformers, which mlx-lm uses for its tokenizers, from importing torch where it is installed.

    torch takes nearly half a GiB of memory and two seconds of the start, and nothing here uses it. A process that has
    imported torch already keeps it.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment] # an import raises ModuleNotFoundError
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that torch's models are missing
