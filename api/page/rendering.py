"""Render templates as replies. No script but the files in static/ can run, and nothing comes from another host."""

import re
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from scorepool.api.http import openapi
from scorepool.api.http.errors import ApiError, Unauthorized, bad_parameter, redis_unanswered
from scorepool.api.page import formatting

STATIC = Path(__file__).with_name("static")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer, browsers send forms with `Origin: null`
    "Cache-Control": "no-store",
}
_environment = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_environment.filters.update(formatting.FILTERS)
_environment.globals.update(version=openapi.VERSION, now=time.time)


class PageFiles(StaticFiles):
    """Serve the files of the pages under the same policy as pages. Browsers may keep them."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update({name: value for name, value in HEADERS.items() if name != "Cache-Control"})
        return response


_OWN_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]*")  # no other host, no control character, no backslash


class LoginNeeded(Exception):
    """Nobody is logged in."""


def render(template: str, **values: Any) -> str:
    """Return a rendered template."""
    return _environment.get_template(template).render(values)


def html(template: str, status_code: int = 200, **values: Any) -> Response:
    """Reply with a rendered template."""
    return HTMLResponse(render(template, **values), status_code, HEADERS)


def own_path(path: str) -> str:
    """Return a path of this server that a link or a login may lead to; the overview for anything else."""
    return path if _OWN_PATH.fullmatch(path) else "/"


def error_page(request: Request, status: int, message: str) -> Response:
    """Reply with a page that says what is wrong, with the menu for those who are logged in, and a link back."""
    values = {"viewer": getattr(request.state, "viewer", None), "here": "", "back": _page_before(request)}
    return html("error.html", status, title=HTTPStatus(status).phrase, message=message, **values)


def _page_before(request: Request) -> str:
    """Return the path of this server's page from which the browser comes; "" if it comes from elsewhere."""
    try:
        parts = urlsplit(request.headers.get("referer", ""))
    except ValueError:
        return ""
    if parts.netloc != request.headers.get("host"):
        return ""
    return own_path(parts._replace(scheme="", netloc="", fragment="").geturl())


def login_path(request: Request) -> str:
    """Return the path of the login that leads back to the page of a request."""
    page = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    leads_back = request.method == "GET" and page != "/" and "/events" not in page
    return "/login?" + urlencode({"next": page}) if leads_back else "/login"


def install(app: FastAPI) -> None:
    """Answer browsers that ask for a path that is none with a page. Other clients get what `errors` answers."""
    answer = app.exception_handlers[HTTPException]

    @app.exception_handler(HTTPException)
    async def on_no_page(request: Request, error: HTTPException) -> Response:
        wants_page = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if not wants_page or request.url.path.startswith("/v1/"):
            return await answer(request, error)  # type: ignore[no-any-return, misc]
        return error_page(request, error.status_code, "There is no such page.")


class PageRoute(APIRoute):
    """A route whose errors are pages, and which leads to the login if nobody is logged in."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginNeeded:
                return RedirectResponse(login_path(request), 303, HEADERS)
            except ApiError as error:
                reply = error_page(request, error.status, error.message)
                reply.headers.update(error.headers)
                return reply
            except RequestValidationError as error:
                return error_page(request, 400, bad_parameter(error).message)
            except RedisError:
                return error_page(request, 503, redis_unanswered().message)

        return handle_errors


class ScriptRoute(APIRoute):
    """A route that the page's scripts call. Errors are those of the API, in JSON."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handle_login(request: Request) -> Response:
            try:
                return await handle(request)
            except LoginNeeded:
                raise Unauthorized("the session has ended: load the page again and log in") from None

        return handle_login
