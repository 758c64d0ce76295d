"""Serve the routes by which clients of SGLang and vLLM change weights from a folder, and name their version.

The version of these routes is a text: the label of a version, else its number. Their model is the only one that is
served, or the one that `model` names.
"""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import ModelsDep, Operator, Owner, SettingsDep, WeightsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import BadRequest, Unavailable
from scorepool.api.http.formats import reply
from scorepool.wire.request_fields import ModelName
from scorepool.wire.weights import Label

router = APIRouter(tags=["weights"], dependencies=[Depends(known_query)])
FolderPath = Annotated[str, Meta(min_length=1, max_length=4096, description="A folder on every worker's machine.")]


class UpdateWeights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Load other weights from a folder, as SGLang's clients ask for it."""

    model_path: FolderPath
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: Annotated[bool, Meta(description="Prefix caches of other weights are never used: expected true.")] = (
        True
    )
    abort_all_requests: Annotated[bool, Meta(description="True: jobs that have begun begin anew.")] = False
    weight_version: Annotated[Label | None, Meta(description="The label of the version.")] = None
    model: ModelName | None = None


class WeightsUpdated(Struct, frozen=True, kw_only=True):
    """Say that all workers serve the weights."""

    success: bool
    message: str
    num_paused_requests: int = 0


class RenameWeights(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Give the version that serves another label."""

    new_version: Label
    abort_all_requests: Annotated[bool, Meta(description="Nothing is aborted, for no number changes.")] = False
    model: ModelName | None = None


class WeightsRenamed(Struct, frozen=True, kw_only=True):
    """Say that the version has the label."""

    success: bool
    message: str
    new_version: str


class WeightVersion(Struct, frozen=True, kw_only=True):
    """Name the version that serves."""

    weight_version: Annotated[str, Meta(description="Its label, else its number.")]


@router.post(
    "/update_weights_from_disk",
    summary="Load weights from a folder, as SGLang has it",
    responses=openapi.responses({200: WeightsUpdated}, (400, 401, 403, 404, 408, 409, 413, 415, 503)),
    openapi_extra=openapi.request_body(UpdateWeights, {"model_path": "/models/policy-12", "weight_version": "step 12"}),
)
async def update_weights_from_disk(
    request: Request, _: Operator, settings: SettingsDep, models: ModelsDep, weights: WeightsDep
) -> Response:
    """Push a folder as `POST /v1/models/{id}/weights` does, and answer when all workers serve it."""
    body = await read_message(request, UpdateWeights, settings.max_body_bytes)
    if not body.flush_cache:
        raise BadRequest("flush_cache: expected true, because caches of other weights are never used", "flush_cache")
    model = (await models.find(body.model)).id
    on_running: wire.OnRunning = "restart" if body.abort_all_requests else "finish"
    source = wire.WeightsSource(path=body.model_path, label=body.weight_version, on_running=on_running)
    version = await weights.push(model, None, source)
    state = await weights.wait(model, version, settings.max_wait_s)
    if state.version < version or state.state == "switching":
        raise Unavailable(f"version {version} does not serve on all workers yet; GET /v1/models/{model}/weights")
    return reply(WeightsUpdated(success=True, message=f"version {version} serves on all workers"), "json")


@router.post(
    "/update_weight_version",
    summary="Name the version of the weights, as vLLM and SGLang have it",
    responses=openapi.responses({200: WeightsRenamed}, (400, 401, 403, 404, 408, 413, 415, 503)),
    openapi_extra=openapi.request_body(RenameWeights, {"new_version": "step 12"}),
)
async def update_weight_version(
    request: Request, _: Operator, settings: SettingsDep, models: ModelsDep, weights: WeightsDep
) -> Response:
    """Change the label of the version that serves. Its number and its weights stay."""
    body = await read_message(request, RenameWeights, settings.max_body_bytes)
    model = (await models.find(body.model)).id
    await weights.rename(model, body.new_version)
    message = f"the weights of {model} have the label {body.new_version}"
    return reply(WeightsRenamed(success=True, message=message, new_version=body.new_version), "json")


async def _weight_version(
    _: Owner, models: ModelsDep, weights: WeightsDep, model: Annotated[str | None, Query(max_length=128)] = None
) -> Response:
    """Name the version that serves: its label, else its number."""
    state = await weights.read((await models.find(model)).id)
    return reply(WeightVersion(weight_version=state.label or str(state.version)), "json")


for path, whose in (("/weight_info", "vLLM"), ("/get_weight_version", "SGLang")):
    router.add_api_route(
        path,
        _weight_version,
        methods=["GET"],
        name=path.strip("/"),
        summary=f"Name the version of the weights, as {whose} has it",
        responses=openapi.responses({200: WeightVersion}, (400, 401, 404, 503)),
    )
