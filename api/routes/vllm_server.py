"""Serve what trainers ask of a vLLM server itself: its configuration, its size, and to drop cached prompts."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from scorepool.api.dependencies import ModelsDep, Operator, Owner, RedisServersDep, SettingsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.bodies import read_message
from scorepool.api.http.errors import BadRequest
from scorepool.api.http.formats import reply
from scorepool.api.repositories.prefix_caches import reset_prefix_caches
from scorepool.wire import LogprobsMode

NOT_RESET = "Must be false: requests that run go on."
router = APIRouter(tags=["vllm"], dependencies=[Depends(known_query)])


class ModelConfig(Struct, frozen=True, kw_only=True):
    """Describe the model that is served. All but the mode is null if there are several, or none."""

    model: str | None
    dtype: str | None
    max_model_len: Annotated[int | None, Meta(description="Tokens of the model's context.")]
    logprobs_mode: Annotated[LogprobsMode, Meta(description="The mode of requests that name none.")]


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Give the parts of vLLM's configuration that clients read."""

    model_config: ModelConfig
    weight_transfer_config: Annotated[
        None, Meta(description="There is no NCCL: weights are pushed with `POST /v1/models/{id}/weights`.")
    ] = None


class ServerInfo(Struct, frozen=True, kw_only=True):
    """Describe the server."""

    vllm_config: ServerConfig


class WorldSize(Struct, frozen=True, kw_only=True):
    """Count the live workers."""

    world_size: int


class ResetOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Choose what is dropped. The body may be left out."""

    reset_running_requests: Annotated[bool, Meta(description=NOT_RESET)] = False


class ResetCaches(Struct, frozen=True, kw_only=True):
    """Say whether the workers were told to drop the KV caches of prompts."""

    success: bool


@router.get(
    "/server_info",
    summary="Show what trainers ask of the server's configuration",
    responses=openapi.responses({200: ServerInfo}, (400, 401, 503)),
)
async def read_server_info(
    _: Owner, settings: SettingsDep, models: ModelsDep, config_format: Literal["json"] = "json"
) -> Response:
    """Show the mode of logprobs and the only model, in the shape of vLLM's route of this name."""
    live = await models.live()
    served = live[0] if len({model.id for model in live}) == 1 else None
    config = ModelConfig(
        model=served.id if served else None,
        dtype=served.stamp.dtype if served else None,
        max_model_len=served.context_length if served else None,
        logprobs_mode=settings.logprobs_mode,
    )
    return reply(ServerInfo(vllm_config=ServerConfig(model_config=config)), "json")


@router.get(
    "/get_world_size",
    summary="Count the live workers",
    responses=openapi.responses({200: WorldSize}, (400, 401, 503)),
)
async def get_world_size(
    _: Owner,
    models: ModelsDep,
    include_dp: Annotated[bool, Query(description="Has no effect: workers are independent of each other.")] = True,
) -> Response:
    """Count the workers that serve a model now."""
    return reply(WorldSize(world_size=len(await models.live())), "json")


@router.post(
    "/reset_prefix_cache",
    summary="Drop the KV caches of shared prompts",
    responses=openapi.responses({200: ResetCaches}, (400, 401, 403, 408, 413, 415, 503)),
    openapi_extra=openapi.request_body(ResetOptions, {"reset_running_requests": False}),
)
async def reset_prefix_cache(
    _: Operator,
    servers: RedisServersDep,
    request: Request,
    settings: SettingsDep,
    reset_running_requests: Annotated[bool, Query(description=NOT_RESET)] = False,
) -> Response:
    """Tell all workers to drop them. It changes no number: caches of other weights are never used.

    Files of `SCOREPOOL_PREFIX_DISK_BYTES` stay.
    """
    if "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0":
        body = await read_message(request, ResetOptions, settings.max_body_bytes)
        reset_running_requests = reset_running_requests or body.reset_running_requests
    if reset_running_requests:
        raise BadRequest("reset_running_requests: expected false: requests that run go on", "reset_running_requests")
    await reset_prefix_caches(servers)
    return reply(ResetCaches(success=True), "json")
