"""Load the model that stdin describes and print why it cannot be loaded, if so: the child process of trial.py."""

import json
import os
import sys
import threading
import time
from dataclasses import replace

from scorepool.engine.engine import Engine
from scorepool.engine.errors import LoadError
from scorepool.engine.settings import EngineSettings
from scorepool.engine.trial import prevent_torch_import


def main() -> None:
    """Load the model, and end without the clean-up of Python and MLX, which is not on trial."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # libraries print
    order = json.load(sys.stdin)
    threading.Thread(target=_end_with_parent, args=(order["parent"],), daemon=True).start()
    prevent_torch_import()
    try:
        Engine(replace(EngineSettings(**order["settings"]), tries_load=False))
    except LoadError as error:
        stdout.write(json.dumps(error.message))
        stdout.flush()
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
