"""Show the OpenAPI document, with requests to try: Swagger UI from the package's own files. No key is needed."""

from fastapi import APIRouter
from starlette.responses import Response

from scorepool.api.page.rendering import PageRoute, html

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/docs")
async def docs() -> Response:
    """Show the page."""
    return html("docs.html", viewer=None)
