"""Log in to the page with an API key."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from scorepool.api.auth import digest_of
from scorepool.api.dependencies import KeyringDep, SessionsDep, SettingsDep
from scorepool.api.http.errors import Unauthorized
from scorepool.api.http.forms import read_form
from scorepool.api.page.rendering import HEADERS, PageRoute, html, own_path
from scorepool.api.page.viewer import COOKIE, OwnOrigin, set_cookie

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/login")
async def form(keyring: KeyringDep, after: Annotated[str, Query(alias="next", max_length=2048)] = "/") -> Response:
    """Ask for a key."""
    if not keyring:
        return RedirectResponse(own_path(after), 303, HEADERS)
    return html("login.html", viewer=None, error="", after=own_path(after))


@router.post("/login", dependencies=[OwnOrigin])
async def login(request: Request, keyring: KeyringDep, sessions: SessionsDep, settings: SettingsDep) -> Response:
    """Begin a session."""
    fields = await read_form(request)
    key, after = fields.get("key", "").strip(), own_path(fields.get("next", "/"))
    try:
        owner = keyring.owner(key)
    except Unauthorized:
        return html("login.html", 401, viewer=None, error="This server does not know this key.", after=after)
    reply = RedirectResponse(after, 303, HEADERS)
    if keyring:
        set_cookie(reply, request, settings, await sessions.create(owner, digest_of(key)))
    return reply


@router.post("/logout", dependencies=[OwnOrigin])
async def logout(request: Request, sessions: SessionsDep, settings: SettingsDep) -> Response:
    """End the session."""
    await sessions.end(request.cookies.get(COOKIE, ""))
    reply = RedirectResponse("/login", 303, HEADERS)
    set_cookie(reply, request, settings, "")
    return reply
