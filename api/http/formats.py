"""Choose between JSON and msgpack for the body and the reply, and encode replies in either."""

from collections.abc import Mapping, Sequence

from starlette.responses import Response

from scorepool import wire

MEDIA_TYPES: dict[wire.Format, str] = {"json": "application/json", "msgpack": "application/msgpack"}
FORMATS: dict[str, wire.Format] = {
    "application/json": "json",
    "application/msgpack": "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}


def sent_format(content_type: str | None) -> wire.Format:
    """Return the format that a Content-Type names. Raises ValueError with a sentence.

    A missing header is refused too: browsers send bodies without one across sites without asking, and a server on
    loopback has no key to stop them.
    """
    expected = "expected application/json or application/msgpack"
    if not content_type:
        raise ValueError(f"Content-Type is missing; {expected}")
    media_type = media_type_of(content_type)
    if media_type not in FORMATS:
        raise ValueError(f"Content-Type: {wire.cut(media_type)} is not read; {expected}")
    return FORMATS[media_type]


def media_type_of(content_type: str) -> str:
    """Return the media type that a Content-Type names. Raises ValueError with a sentence if a charset is not UTF-8."""
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise ValueError(f"Content-Type: charset {wire.cut(value)} is not read; send utf-8")
    return media_type


def accepted_format(accept: Sequence[str]) -> wire.Format:
    """Return the format with the highest q value in the Accept headers; JSON in a tie.

    Raises ValueError with a sentence if neither is acceptable.
    """
    ranges = [part for header in accept for part in header.split(",") if part.strip()]
    if not ranges:
        return "json"
    quality: dict[wire.Format, tuple[int, float]] = {}  # the most specific range decides
    for text in ranges:
        media_range, q = _media_range(text)
        for name, specificity in _covers(media_range):
            if specificity >= quality.get(name, (0, 0.0))[0]:
                quality[name] = (specificity, q)
    wanted = {name: q for name, (_, q) in quality.items() if q > 0}
    if not wanted:
        raise ValueError(
            f"Accept: {wire.cut(', '.join(accept))} includes no format of this server; "
            "expected application/json or application/msgpack"
        )
    return "json" if wanted.get("json", 0.0) >= wanted.get("msgpack", 0.0) else "msgpack"


def _media_range(text: str) -> tuple[str, float]:
    media_range, *parameters = (part.strip().lower() for part in text.split(";"))
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return media_range, float(value)
            except ValueError:
                raise ValueError(f"Accept: q={wire.cut(value)} is not a number") from None
    return media_range, 1.0


def _covers(media_range: str) -> list[tuple[wire.Format, int]]:
    """List the formats that a media range includes, each with how specific the range is."""
    if media_range == "*/*":
        return [("json", 1), ("msgpack", 1)]
    if media_range == "application/*":
        return [("json", 2), ("msgpack", 2)]
    return [(FORMATS[media_range], 3)] if media_range in FORMATS else []


def reply(
    message: object, reply_format: wire.Format, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Encode a message as a reply."""
    content = wire.encode_json(message) if reply_format == "json" else wire.encode(message)
    return Response(
        content, status, headers={"Vary": "Accept", **(headers or {})}, media_type=MEDIA_TYPES[reply_format]
    )
