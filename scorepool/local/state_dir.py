"""Find the folder for state that outlives a process: the embedded Redis and logs."""

import os
import sys
from pathlib import Path


def state_dir(configured: str = "") -> Path:
    """Return the state folder, readable only by its owner. Create it if it is missing.

    `configured` has precedence. The default is ~/Library/Application Support/scorepool on macOS and
    $XDG_STATE_HOME/scorepool elsewhere
    (https://specifications.freedesktop.org/basedir-spec).
    """
    if configured:
        folder = Path(configured).expanduser()
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Application Support" / "scorepool"
    else:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "scorepool"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
