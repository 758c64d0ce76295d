"""Serve /docs: the OpenAPI document as one page that loads nothing, neither from this server nor from another."""

import json
from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
code,pre,summary{{font-family:ui-monospace,monospace}}pre{{overflow:auto;background:#8881;padding:1rem}}
@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}a{{color:#9cf}}}}</style>
<h1>{title}</h1><p>{summary} For tools, as JSON: <a href="openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>{routes}<h2>Messages</h2>{schemas}</html>"""


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """Answer with the page."""
    headers = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(page(request.app.openapi()), headers=headers)


def page(document: dict[str, Any]) -> str:
    """Render an OpenAPI document as HTML."""
    routes = [
        _details(f"{method.upper()} {path}", operation, operation.get("description", operation.get("summary", "")))
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    messages = document["components"]["schemas"]
    schemas = [_details(name, schema, schema.get("description", "")) for name, schema in messages.items()]
    title, summary = document["info"]["title"], document["info"]["summary"]
    return _PAGE.format(
        title=escape(title), summary=escape(summary), routes="\n".join(routes), schemas="\n".join(schemas)
    )


def _details(name: str, content: Any, text: str) -> str:
    body = escape(json.dumps(content, indent=1, ensure_ascii=False))
    return f"<details><summary>{escape(name)}</summary><p>{escape(text)}</p><pre>{body}</pre></details>"
