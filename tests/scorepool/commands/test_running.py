"""How subcommands load what they need."""

import subprocess
import sys

SCRIPT = """
import sys
from scorepool.commands.running import LazyModule

files = LazyModule("scorepool.files")
assert "scorepool.files" not in sys.modules
from scorepool.files.errors import FileError
assert files.FileError is FileError  # another one would not be caught
"""


def test_a_room_is_loaded_once_and_when_it_is_used():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)
