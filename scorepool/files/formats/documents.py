"""Read documents: each text file of a folder, one text file, or the rows of a table."""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from scorepool.files.errors import BadInput
from scorepool.files.formats.registry import STDIO, Source, is_table, open_source, show_path
from scorepool.files.rows import Row

FILE_COLUMN, TEXT_COLUMN = "file", "text"
DEFAULT_GLOB = "**/*.txt"
MAX_CHARACTERS = 8_000_000  # of a text that the API takes
_MAX_BYTES = 4 * MAX_CHARACTERS


def are_files(path: str, input_format: str | None) -> bool:
    """True if documents are files; False if they are rows of a table."""
    return path != STDIO and (Path(path).is_dir() or not (input_format or is_table(path)))


def check_characters(text: str) -> None:
    """Check how long a document is. Raises ValueError for one that is empty or too long."""
    if not 0 < len(text) <= MAX_CHARACTERS:
        raise ValueError(f"the document has {len(text)} characters: expected 1 to {MAX_CHARACTERS}")


def open_documents(
    path: str, input_format: str | None, glob: str, outputs: Collection[Path] = ()
) -> AbstractContextManager[Source]:
    """Open documents. Those that are files are rows with the columns `file` and `text`. Raises BadInput.

    `outputs` are not documents, although they may lie in the folder: they change while the work is done.
    """
    return _open_files(path, glob, outputs) if are_files(path, input_format) else open_source(path, input_format)


@contextmanager
def _open_files(path: str, glob: str, outputs: Collection[Path]) -> Iterator[Source]:
    root = Path(path)
    if root.is_dir():
        excluded = {each.resolve() for each in outputs}
        try:
            paths = sorted(each for each in root.glob(glob) if each.is_file() and each.resolve() not in excluded)
        except (ValueError, NotImplementedError) as error:
            raise BadInput(f"--glob is {glob!r}: {error}") from None
        if not paths:
            raise BadInput(f"{path} has no file {glob}: name its files with --glob, such as '**/*.md'")
        names = [_shown(each.relative_to(root)) for each in paths]
    else:
        paths, names = [root], [_shown(root)]
    try:
        stats = [each.stat() for each in paths]
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}") from None
    sizes = [each.st_size for each in stats]
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in zip(names, stats, strict=True)])
    digest = hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()
    identity = {"FILE": show_path(root.absolute()), "the digest of FILE's names, sizes and times": digest}
    yield Source(show_path(path), path, _rows(paths, names, sizes), sum(sizes), identity, None)


def _shown(path: Path) -> str:
    """Return a path as text. Bytes that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode("utf-8", "replace")


def _rows(paths: list[Path], names: list[str], sizes: list[int]) -> Iterator[Row]:
    position = 0
    for number, (path, name, size) in enumerate(zip(paths, names, sizes, strict=True), 1):
        position += size
        try:
            text = _read_text(path, size)
            check_characters(text)
        except ValueError as error:
            yield Row(number, number, position, None, f"{name}: {error}")
        else:
            yield Row(number, number, position, {FILE_COLUMN: name, TEXT_COLUMN: text})


def _read_text(path: Path, size: int) -> str:
    """Return the text of a file, with its line ends as they are. Raises ValueError."""
    if size > _MAX_BYTES:
        raise ValueError(f"the file has {size} bytes: expected at most {_MAX_BYTES}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("the file is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"cannot read the file: {error.strerror}") from None
