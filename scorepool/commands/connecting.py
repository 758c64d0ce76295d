"""Connect a subcommand to an API, and turn what may go wrong into one sentence and an exit status."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from scorepool import wire
from scorepool.commands.running import FAILED, UNREACHABLE, CommandError
from scorepool.sdk import Client, ScorepoolError, Unreachable

RETRY_S = 2.0  # a command's user waits


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[Client]:
    """Yield a client of the API at a URL. Raises CommandError for every error of the client in the context."""
    if api_key and not api_key.isascii():  # HTTP headers are ASCII
        raise CommandError("the API key has characters that no key has: expected what `scorepool key` prints")
    try:
        with Client(url, api_key, retry_s=RETRY_S) as client:
            yield client
    except ScorepoolError as error:
        raise CommandError(str(error), FAILED) from None
    except Unreachable:
        raise CommandError(
            f"no API answers at {url}: start one with `scorepool serve`, or give the URL of another with --url or "
            "SCOREPOOL_URL",
            UNREACHABLE,
        ) from None
    except (httpx.UnsupportedProtocol, httpx.InvalidURL):
        raise CommandError(
            f"the URL is {url!r}: expected http://HOST:PORT, https://HOST or unix:///PATH", UNREACHABLE
        ) from None
    except wire.Invalid as error:
        raise CommandError(f"what answers at {url} is no scorepool API of this release: {error}", UNREACHABLE) from None


def print_json(message: object) -> None:
    """Print a message as one line of JSON."""
    print(wire.encode_json(message).decode())  # noqa: T201


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of one length as lines with aligned columns, two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
