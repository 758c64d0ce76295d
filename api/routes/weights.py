"""Serve /v1/models/{model}/weights: push a version of a model's weights, and show the versions."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    ModelsDep,
    Operator,
    Owner,
    ReplyFormat,
    SettingsDep,
    WeightsDep,
    known_query,
)
from scorepool.api.http import openapi
from scorepool.api.http.bodies import body_chunks, read_message
from scorepool.api.http.errors import BadRequest, Conflict, ModelNotServed
from scorepool.api.http.formats import reply
from scorepool.api.repositories.models import Models
from scorepool.wire.weights import MAX_VERSION

DEFAULT_WAIT_S = 60.0
OCTETS = "application/octet-stream"

router = APIRouter(prefix="/v1/models", tags=["weights"], dependencies=[Depends(known_query)])
ModelName = Annotated[str, Path(alias="id")]
_PUSH = openapi.request_body(wire.PushWeights, {"path": "/models/policy-12", "label": "step 12"})


def _with_octets(extra: dict[str, Any]) -> dict[str, Any]:
    """Let a body be a safetensors file too."""
    extra["requestBody"]["content"][OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    return extra


@router.get(
    "/{id:path}/weights",
    summary="Show the versions of a model's weights",
    responses=openapi.responses({200: wire.WeightsState}, (400, 401, 404, 406, 503)),
)
async def read_weights(
    name: ModelName, _: Owner, reply_format: ReplyFormat, models: ModelsDep, weights: WeightsDep
) -> Response:
    """Show which version serves, which is being loaded, and what was refused last."""
    return reply(await weights.read(await own_name(models, name)), reply_format)


@router.post(
    "/{id:path}/weights",
    summary="Push a version of a model's weights",
    responses=openapi.responses(
        {200: wire.WeightsState, 202: wire.WeightsState}, (400, 401, 403, 404, 406, 408, 409, 413, 415, 503)
    ),
    openapi_extra=_with_octets(_PUSH),
)
async def push_weights(
    request: Request,
    name: ModelName,
    _: Operator,
    reply_format: ReplyFormat,
    settings: SettingsDep,
    models: ModelsDep,
    weights: WeightsDep,
    version: Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Only with a file as the body.")] = None,
    label: Annotated[
        str | None, Query(min_length=1, max_length=256, description="Only with a file as the body.")
    ] = None,
    on_running: Annotated[wire.OnRunning, Query(description="Only with a file as the body.")] = "finish",
    wait_s: Annotated[
        float, Query(alias="wait", ge=0, allow_inf_nan=False, description="Seconds to wait until all have moved.")
    ] = DEFAULT_WAIT_S,
) -> Response:
    """Load other weights of the same architecture, from a folder on the workers' machines or from a safetensors file.

    The keys of operators may do it. All workers of the model load and check them beside those that serve; if one
    refuses them, none moves, and the reply is 400 with the reason. 200: all workers serve the version. 202: the wait is
    over before that. The body is JSON, or the file as application/octet-stream with the other fields in the query.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == OCTETS:
        model = await own_name(models, name)
        chunks = body_chunks(request, settings.max_weights_bytes, "SCOREPOOL_MAX_WEIGHTS_BYTES")
        source = replace(await weights.upload(model, chunks), label=label, on_running=on_running)
        try:
            number = await weights.push(model, version, source)
        except (BadRequest, Conflict, ModelNotServed):  # else it may be pending; if it is not, the upload expires
            await weights.drop(model, source.upload or "")
            raise
    else:
        body = await read_message(request, wire.PushWeights, settings.max_body_bytes)
        source = wire.WeightsSource(path=body.path, label=body.label, on_running=body.on_running)
        model = await own_name(models, name)
        number = await weights.push(model, body.version, source)
    state = await weights.wait(model, number, min(wait_s, settings.max_wait_s))
    has_moved = state.version >= number and state.state != "switching"
    return reply(state, reply_format, status=200 if has_moved else 202)


async def own_name(models: Models, name: str) -> str:
    """Return the model's own name for a name or alias. Raises ModelNotServed."""
    return (await models.find(name)).id
