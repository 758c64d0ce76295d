"""Print the perplexity of a corpus."""

import typer
from msgspec import to_builtins

from scorepool.commands.connecting import aligned
from scorepool.commands.on_files import counted, show_estimate, show_remarks
from scorepool.files import FILE_COLUMN, Perplexity
from scorepool.files.rows import Values

_MEASURES = ("num_tokens", "num_bytes", "logprob_sum", "perplexity", "bits_per_token", "bits_per_byte")


def show_perplexity(found: Perplexity, out: str | None) -> None:
    """Print a table of the documents and of all together: on stdout without OUT, else on stderr the latter alone."""
    if found.estimate is not None:
        show_estimate(found, found.estimate)
        return
    numbered = zip(found.numbers, found.documents, strict=True)
    documents = [(str(row.get(FILE_COLUMN, number)), *_cells(row)) for number, row in numbered]
    table = aligned([("document", *_MEASURES), *documents, ("all", *_cells(to_builtins(found)))])
    typer.echo(table, err=out is not None)
    typer.echo(counted(found.num_documents, found.num_failed, "document"), err=True)
    show_remarks(found, out)


def _cells(values: Values) -> list[str]:
    return [_cell(values[name]) for name in _MEASURES]


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else f"{value}"
