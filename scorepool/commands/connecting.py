"""Connect a subcommand to an API, and turn what may go wrong into one sentence and an exit status."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx

from scorepool import wire
from scorepool.commands.running import FAILED, MISUSED, UNREACHABLE, CommandError
from scorepool.sdk import Client, InvalidUrl, NotScorepool, ScorepoolError, Unreachable

RETRY_S = 2.0  # a command's user waits
UNKNOWN = "unknown"  # code of errors that are not from the API


@contextmanager
def connect(url: str, api_key: str | None) -> Iterator[Client]:
    """Yield a client of the API at a URL. Raises CommandError for every error of the client in the context."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):  # as HTTP headers are
        raise CommandError("the API key has characters that no key has: expected what `scorepool key` prints", MISUSED)
    logging.getLogger("scorepool").addHandler(logging.NullHandler())  # the client's lines; errors are reported below
    try:
        with Client(url, api_key, retry_s=RETRY_S) as client:
            yield client
    except ScorepoolError as error:
        raise refusal(url, error) from None
    except Unreachable:
        raise CommandError(
            f"no API answers at {url}: start one with `scorepool serve`, or give the URL of another with --url or "
            "SCOREPOOL_URL",
            UNREACHABLE,
        ) from None
    except InvalidUrl as error:
        raise CommandError(str(error), MISUSED) from None
    except NotScorepool as error:
        raise CommandError(str(error), UNREACHABLE) from None
    except wire.Invalid as error:
        raise CommandError(f"what answers at {url} is no scorepool API of this release: {error}", UNREACHABLE) from None


def refusal(url: str, error: ScorepoolError) -> CommandError:
    """Return the sentence and exit status of a refusal."""
    if error.status == httpx.codes.UNAUTHORIZED:
        return CommandError(f"{url}: {error.message}; give one by SCOREPOOL_API_KEY or --api-key", UNREACHABLE)
    if error.code == UNKNOWN:
        return CommandError(f"what answers at {url} is no scorepool API: HTTP {error.status}", UNREACHABLE)
    return CommandError(str(error), FAILED)


def print_json(message: object) -> None:
    """Print a message as one line of JSON."""
    print(wire.encode_json(message).decode())  # noqa: T201


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of one length as lines with aligned columns, two blanks between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
