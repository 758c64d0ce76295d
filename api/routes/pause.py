"""Serve the routes by which clients of vLLM pause the server around an update of its weights, and resume it."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from msgspec import Struct
from starlette.responses import Response

from scorepool.api.dependencies import Operator, Owner, PauseDep, SettingsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.formats import reply

router = APIRouter(tags=["weights"], dependencies=[Depends(known_query)])
Mode = Literal["abort", "wait", "keep"]
ABORT_REFUSED = (
    "mode: expected wait or keep, found abort, which is also what no mode means: jobs that run end as usual; cancel "
    "them with POST /v1/jobs/{id}/cancel, or have them begin anew with on_running=restart of the push"
)


class Paused(Struct, frozen=True, kw_only=True):
    """Say that no job begins any more; after the mode `wait` none runs either."""

    status: Literal["paused"] = "paused"


class Resumed(Struct, frozen=True, kw_only=True):
    """Say that jobs begin again."""

    status: Literal["resumed"] = "resumed"


class IsPaused(Struct, frozen=True, kw_only=True):
    """Say whether the server is paused."""

    is_paused: bool


@router.post(
    "/pause",
    summary="Pause all models, as vLLM has it",
    responses=openapi.responses({200: Paused}, (400, 401, 403, 409, 503)),
)
async def pause_generation(
    _: Operator,
    settings: SettingsDep,
    pause: PauseDep,
    mode: Annotated[
        Mode,
        Query(
            description="`wait`: answer when the jobs that run have ended. `keep`: answer at once; they go on, with "
            "the weights that they began with. `abort` is refused."
        ),
    ] = "abort",
    clear_cache: Annotated[bool, Query(description="Drop the KV caches of shared prompts, too.")] = True,
) -> Response:
    """Let no job begin. Jobs are accepted and wait; weights can be pushed.

    vLLM's `keep` freezes what runs, which then goes on with other weights. Here no result mixes two versions, so it
    ends with the weights that it began with.
    """
    if mode == "abort":
        raise BadRequest(ABORT_REFUSED, "mode")
    await pause.begin()
    if mode == "wait":
        await pause.wait(settings.max_wait_s)
    if clear_cache:
        await pause.clear_caches()
    return reply(Paused(), "json")


@router.post(
    "/resume",
    summary="End a pause, as vLLM has it",
    responses=openapi.responses({200: Resumed}, (400, 401, 403, 503)),
)
async def resume_generation(_: Operator, pause: PauseDep) -> Response:
    """Let jobs begin again. Without a pause, nothing happens."""
    await pause.end()
    return reply(Resumed(), "json")


@router.get(
    "/is_paused",
    summary="Tell whether the server is paused, as vLLM has it",
    responses=openapi.responses({200: IsPaused}, (400, 401, 503)),
)
async def is_paused(_: Owner, pause: PauseDep) -> Response:
    """Tell whether `POST /pause` holds."""
    return reply(IsPaused(is_paused=await pause.holds()), "json")
