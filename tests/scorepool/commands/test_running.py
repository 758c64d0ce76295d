"""How subcommands load what they need."""

import subprocess
import sys

SCRIPT = """
import sys
from scorepool.commands.running import import_lazily

assert "scorepool.files" not in sys.modules
files = import_lazily("scorepool.files")
assert "scorepool.files.functions" not in sys.modules
assert import_lazily("scorepool.files") is files  # another one would have classes of its own
assert files.FileError
assert "scorepool.files.functions" in sys.modules
import scorepool.files
assert scorepool.files is files
"""


def test_a_room_is_loaded_once_and_when_it_is_used():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
