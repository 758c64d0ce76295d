"""Find out who looks at a page: cookies for the page alone, which no route under /v1 reads."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import KeyringDep, SessionsDep, SettingsDep
from scorepool.api.http.errors import Forbidden
from scorepool.api.http.large_replies import HeldResults, held_results
from scorepool.api.page.rendering import LoginNeeded
from scorepool.api.repositories.sessions import SESSION_S
from scorepool.store import LOCAL_OWNER, Settings

COOKIE = "scorepool_session"


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at a page, and whose jobs they look at."""

    name: str
    owner: str  # whose jobs are shown
    owners: list[str]  # of whom they may be shown
    has_login: bool  # False on a server without keys

    @property
    def query(self) -> str:
        """The query that keeps the owner in links."""
        return "" if self.owner == self.name else f"?owner={self.owner}"


async def viewer(
    request: Request, keyring: KeyringDep, sessions: SessionsDep, settings: SettingsDep, owner: str | None = None
) -> Viewer:
    """Return who looks. Raises LoginNeeded, and Forbidden for the jobs of others."""
    if not keyring:
        return Viewer(LOCAL_OWNER, LOCAL_OWNER, [LOCAL_OWNER], has_login=False)
    found = await sessions.read(request.cookies.get(COOKIE, ""))
    if found is None or not keyring.holds(found[0], found[1].key_digest):
        raise LoginNeeded
    name = found[0]
    is_operator = name in [each.strip() for each in settings.operator_keys.split(",")]
    owners = keyring.owners if is_operator else [name]
    if owner is not None and owner not in owners:
        raise Forbidden("your key shows your own jobs; those of others need a key that SCOREPOOL_OPERATOR_KEYS names")
    return Viewer(name, owner or name, owners, has_login=True)


async def own_origin(request: Request, settings: SettingsDep) -> None:
    """Refuse a form that a page of another origin has the browser send. Browsers send Origin with every POST.

    Raises Forbidden.
    """
    origins = request.headers.getlist("origin")
    hosts = {request.headers.get("host", ""), urlsplit(settings.public_url).netloc} - {""}
    if len(origins) != 1 or urlsplit(origins[0]).netloc not in hosts:
        raise Forbidden("this form was not sent by a page of this server (Origin)")


def set_cookie(response: Response, request: Request, settings: Settings, value: str) -> None:
    """Give a session to the browser; "" takes it away. Scripts cannot read it, and other sites cannot send it."""
    is_secure = request.url.scheme == "https" or settings.public_url.startswith("https:")
    response.set_cookie(
        COOKIE,
        value,
        max_age=SESSION_S if value else 0,
        path="/",
        secure=is_secure,
        httponly=True,
        samesite="strict",
    )


ViewerDep = Annotated[Viewer, Depends(viewer)]


async def viewer_results(viewer: ViewerDep) -> AsyncGenerator[HeldResults]:
    """Count the results that this request reads until its reply has been sent, for whoever looks."""
    with held_results(viewer.name) as held:
        yield held


ViewerResultsDep = Annotated[HeldResults, Depends(viewer_results)]
OwnOrigin = Depends(own_origin)
