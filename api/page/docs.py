"""Show the OpenAPI document, with requests to try: Swagger UI from the package's own files. No key is needed."""

from fastapi import APIRouter
from starlette.responses import Response

from scorepool.api.page.rendering import PageRoute, html
from scorepool.api.page.viewer import VisitorDep

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/docs")
async def docs(visitor: VisitorDep) -> Response:
    """Show the page, with the menu for those who are logged in."""
    return html("docs.html", viewer=visitor)
