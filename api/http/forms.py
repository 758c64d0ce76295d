"""Read forms without files. They are UTF-8, whatever codec they name."""

from collections import Counter
from collections.abc import Iterable
from urllib.parse import parse_qsl

from starlette.requests import Request

from scorepool import wire
from scorepool.api.http.bodies import body_chunks
from scorepool.api.http.errors import BadRequest, UnsupportedMedia
from scorepool.api.http.formats import media_type_of

MEDIA_TYPE = "application/x-www-form-urlencoded"
MAX_FORM_BYTES = 16 * 1024
MAX_FIELDS = 8


async def read_form(request: Request) -> dict[str, str]:
    """Read a form of at most MAX_FORM_BYTES. Raises UnsupportedMedia, TooLarge, TooSlow, BadRequest."""
    _check_type(request.headers.get("content-type", ""))
    chunks = [chunk async for chunk in body_chunks(request, MAX_FORM_BYTES, "of this route")]
    try:
        text = b"".join(chunks).decode()
        fields = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
    except UnicodeDecodeError:
        raise BadRequest("the form is not UTF-8") from None
    except ValueError:
        raise BadRequest(f"the form has too many fields; expected at most {MAX_FIELDS}") from None
    check_field_names(name for name, _ in fields)
    return dict(fields)


def check_field_names(names: Iterable[str]) -> None:
    """Check that no field is given twice. Raises BadRequest."""
    [(name, times)] = Counter(names).most_common(1) or [("", 1)]
    if times > 1:
        raise BadRequest(f"{wire.cut(name)}: given {times} times, expected once", wire.cut(name))


def _check_type(content_type: str) -> None:
    try:
        media_type = media_type_of(content_type)
    except ValueError as error:
        raise UnsupportedMedia(str(error), "Content-Type") from None
    if media_type != MEDIA_TYPE:
        raise UnsupportedMedia(f"Content-Type: expected {MEDIA_TYPE}", "Content-Type")
