"""Draw how far the work on a file is, on a terminal. The numbers are those of scorepool/files/progress.py."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column


class ProgressBar:
    """A bar on stderr and a line beside it, which `close` removes. Has no thread: each `show` draws it."""

    def __init__(self) -> None:
        text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._progress = Progress(
            BarColumn(bar_width=None),  # what the text leaves
            text,
            console=Console(stderr=True, highlight=False),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, line: str, position: int, size: int | None) -> None:
        """Draw the line, and the share of the input that is done if its size in bytes is known."""
        self._progress.update(self._task, description=line, completed=position, total=size)
        self._progress.refresh()

    def print_above(self, line: str) -> None:
        """Print a line that stays."""
        self._progress.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the bar."""
        self._progress.stop()
