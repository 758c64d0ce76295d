"""What routes ask for in their signatures. All async: FastAPI would send plain functions through a thread each."""

import re
from typing import Annotated
from urllib.request import parse_http_list

from fastapi import Depends, Query
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from scorepool.api.http import formats
from scorepool.api.http.errors import BadRequest, NotAcceptable
from scorepool.api.http.formats import Format
from scorepool.api.repositories.jobs import CURSOR
from scorepool.api.state import State

_bearer = HTTPBearer(auto_error=False, description="An API key. Not asked for by a server without keys.")
_KEY = re.compile(r"[\x21-\x7e]{1,255}")


async def state(request: Request) -> State:
    return request.app.state.parts  # type: ignore[no-any-return]


async def owner(
    parts: Annotated[State, Depends(state)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> str:
    """Raises Unauthorized."""
    return parts.keyring.owner(credentials.credentials if credentials else None)


async def reply_format(request: Request) -> Format:
    """Raises NotAcceptable, before anything is done that could not be answered."""
    try:
        return formats.accepted_format(request.headers.getlist("accept"))
    except ValueError as error:
        raise NotAcceptable(str(error), "Accept") from None


async def known_query(request: Request) -> None:
    """Raises BadRequest for a parameter that the route does not have, or that is there twice."""
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known:
            expected = f"expected {', '.join(sorted(known))}" if known else "this route has none"
            raise BadRequest(f"{name[:80]}: unknown query parameter; {expected}", name[:80])
        if names.count(name) > 1:
            raise BadRequest(f"{name}: given {names.count(name)} times, expected once", name)


async def idempotency_key(request: Request) -> str | None:
    """Raises BadRequest."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise BadRequest(f"Idempotency-Key: given {len(keys)} times, expected once", "Idempotency-Key")
    key = keys[0] if keys else None
    if key is not None and not _KEY.fullmatch(key):
        raise BadRequest(
            "Idempotency-Key: expected 1 to 255 printable ASCII characters without spaces, "
            f"found {len(key)} characters",
            "Idempotency-Key",
        )
    return key


async def preferred_wait_s(request: Request) -> int | None:
    """N of `Prefer: wait=N` (RFC 7240); preferences with other names are not ours to judge. Raises BadRequest."""
    for header in request.headers.getlist("prefer"):
        for preference in parse_http_list(header):  # a comma between quotes separates nothing
            name, _, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == "wait":
                seconds = value.strip().strip('"')
                if not (seconds.isascii() and seconds.isdecimal() and len(seconds) <= 9):
                    raise BadRequest(
                        f"Prefer: expected wait=<whole seconds>, found {preference.strip()[:80]!r}", "Prefer"
                    )
                return int(seconds)
    return None


Parts = Annotated[State, Depends(state)]
Owner = Annotated[str, Depends(owner)]
ReplyFormat = Annotated[Format, Depends(reply_format)]
IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]
PreferredWait = Annotated[int | None, Depends(preferred_wait_s)]
WaitS = Annotated[
    float, Query(alias="wait", ge=0, allow_inf_nan=False, description="Seconds to wait for the job's end.")
]
Cursor = Annotated[
    str | None, Query(description="`next_cursor` of the page before.", json_schema_extra={"pattern": CURSOR})
]
Limit = Annotated[int, Query(ge=1, le=200)]
