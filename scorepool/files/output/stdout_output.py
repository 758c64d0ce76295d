"""Write rows to stdout. Nothing is kept for a later process."""

import sys
import uuid
from collections.abc import Collection, Sequence

from scorepool.files.errors import OutputError
from scorepool.files.formats.sinks import CollectingSink, Sink
from scorepool.files.output.encoding import encode_rows
from scorepool.files.output.journal import Counts
from scorepool.files.rows import Done, Values


class StdoutOutput:
    """Stdout. Reasons of rows that fail go to stderr."""

    errors_path = None
    is_complete = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.counts = Counts()
        self.digest = ""
        self.undeleted: list[str] = []
        self.run_id = uuid.uuid4().hex

    def write(self, rows: Sequence[Done]) -> None:
        """Write rows that are done. Raises OutputError."""
        encoded, failed = encode_rows(self._sink, rows)
        for row, reason in failed if sys.stderr else ():
            print(f"row {row.number} (line {row.line}): {reason}", file=sys.stderr)  # noqa: T201
        self._put(encoded)
        self._count(rows, {row.number for row, _ in failed})

    def _count(self, rows: Sequence[Done], failed: Collection[int]) -> None:
        self.counts.add(rows, failed)

    def _put(self, encoded: bytes) -> None:
        try:
            sys.stdout.buffer.write(encoded)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise  # the reader has ended, as `head` does: the command ends quietly
        except OSError as error:
            raise OutputError(f"cannot write to stdout: {error.strerror}") from None

    def is_due(self) -> bool:
        return True

    def save(self) -> None:
        pass

    def finish(self) -> None:
        self._put(self._sink.end())

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class CollectedOutput(StdoutOutput):
    """Rows in memory, and their numbers in the input, in the place of stdout."""

    def __init__(self, collected: list[Values], numbers: list[int]) -> None:
        super().__init__(CollectingSink(collected))
        self._numbers = numbers

    def _count(self, rows: Sequence[Done], failed: Collection[int]) -> None:
        super()._count(rows, failed)
        self._numbers += [each.row.number for each in rows if each.row.number not in failed]
