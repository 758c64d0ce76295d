"""Define what stops the work on a file. Each message is one sentence; `exit_status` is the command's.

    FileError          the base
      BadInput         2  the command or the input cannot work
      ServerError      3  no server, or it refuses; the same command goes on
      OutputError      4  the output cannot be written, e.g. a full disk; the same command goes on

The command exits with 0 if every row is done, 1 if OUT.errors.jsonl names rows that are not, 130 after Ctrl-C.
"""


class FileError(Exception):
    """Work on a file that cannot go on."""

    exit_status = 1


class BadInput(FileError):
    """A command, an option or a file that cannot work."""

    exit_status = 2


class ServerError(FileError):
    """A server that is away or refuses."""

    exit_status = 3


class OutputError(FileError):
    """An output that cannot be written."""

    exit_status = 4
