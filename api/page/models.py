"""Show which models are served, and how each of their workers computes."""

from dataclasses import dataclass
from itertools import groupby

from fastapi import APIRouter
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import ModelsDep
from scorepool.api.page.overview import state_of
from scorepool.api.page.rendering import PageRoute, html
from scorepool.api.page.viewer import ViewerDep

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@dataclass(frozen=True, slots=True)
class ModelSection:
    """A model with its workers, as the page shows it."""

    served: list[wire.ServedModel]

    @property
    def id(self) -> str:
        return self.served[0].id

    @property
    def aliases(self) -> list[str]:
        return sorted({alias for one in self.served for alias in one.aliases})

    @property
    def fingerprints(self) -> list[str]:
        """The weights that its workers hold. Two of them compute different numbers."""
        return sorted({one.stamp.fingerprint for one in self.served})

    @property
    def workers(self) -> list[tuple[wire.ServedModel, str]]:
        return [(one, state_of(one)) for one in self.served]


@router.get("/served-models")
async def models(viewer: ViewerDep, models: ModelsDep) -> Response:
    """Show the models that live workers serve."""
    live = await models.live()  # ordered by model
    sections = [ModelSection(list(served)) for _, served in groupby(live, key=lambda one: one.id)]
    return html("models.html", viewer=viewer, models=sections)
