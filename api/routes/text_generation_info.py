"""Describe the server to clients of text-generation-inference, such as lighteval's."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from msgspec import Meta, Struct
from starlette.responses import Response

from scorepool.api.dependencies import ModelsDep, Owner, SettingsDep, known_query
from scorepool.api.http import openapi
from scorepool.api.http.errors import BadRequest, Unavailable
from scorepool.api.http.formats import reply

router = APIRouter(tags=["text-generation-inference"], dependencies=[Depends(known_query)])


class TextGenerationInfo(Struct, frozen=True, kw_only=True):
    """Describe the only model that is served, and the limits of its requests."""

    model_id: str
    model_sha: Annotated[str, Meta(description="Fingerprint of the weights.")]
    model_dtype: str
    model_device_type: Annotated[str, Meta(description="The engine that computes.")]
    model_pipeline_tag: Literal["text-generation"] = "text-generation"
    max_concurrent_requests: Annotated[int, Meta(description="Jobs that one client may have.")]
    max_best_of: Literal[1] = 1
    max_stop_sequences: int = 64
    max_input_tokens: Annotated[int, Meta(description="Tokens of a prompt: one less than the context.")]
    max_total_tokens: Annotated[int, Meta(description="Tokens of the context: prompt and generated ones.")]
    validation_workers: int = 1
    max_client_batch_size: int = 1
    router: Literal["scorepool"] = "scorepool"
    version: str
    sha: None = None
    docker_label: None = None


@router.get(
    "/info",
    summary="Show the model and the limits",
    responses=openapi.responses({200: TextGenerationInfo}, (400, 401, 503), form="tgi"),
)
async def read_info(_: Owner, models: ModelsDep, settings: SettingsDep) -> Response:
    """Show them in the shape of text-generation-inference's route of this name, if one model is served."""
    by_name = {model.id: model for model in await models.live()}
    if not by_name:
        raise Unavailable("no worker serves a model now")
    if len(by_name) > 1:
        raise BadRequest(f"several models are served, {', '.join(sorted(by_name))}; expected one")
    [served] = by_name.values()
    info = TextGenerationInfo(
        model_id=served.id,
        model_sha=served.stamp.fingerprint,
        model_dtype=f"torch.{served.stamp.dtype}",
        model_device_type=served.stamp.backend,
        max_concurrent_requests=settings.max_bulk_jobs,
        max_input_tokens=served.context_length - 1,
        max_total_tokens=served.context_length,
        version=openapi.VERSION,
    )
    return reply(info, "json")
