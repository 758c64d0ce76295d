"""Serve the routes that Tinker's SDK asks to sample (api/dialects/tinker). They are not in /openapi.json.

    create_session ─► create_sampling_session ─► asample ─► retrieve_future, until the job has ended

Sessions are names, and a future is a job: a restart of the API loses nothing.
"""

import uuid
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    HeldResultsDep,
    ModelsDep,
    Owner,
    QueueDep,
    SettingsDep,
    SubmissionDep,
    known_query,
)
from scorepool.api.dialects.fields import map_field
from scorepool.api.dialects.tinker.reply import CONTENT_TYPE, has_shown, to_failure, to_reply
from scorepool.api.dialects.tinker.sample import SAMPLER, Future, SampleRequest, to_request
from scorepool.api.http.bodies import received_body
from scorepool.api.http.errors import ApiError, BadRequest, NotFound, building_requests, map_field_names
from scorepool.api.http.formats import reply
from scorepool.api.repositories.jobs import ENDED

router = APIRouter(prefix="/api/v1", include_in_schema=False, dependencies=[Depends(known_query)])
WAIT_S = 30.0  # the SDK gives up an answer after 45 s
SamplerId = Annotated[str, Path(alias="id", max_length=256)]
_FIELDS = map_field(
    {
        "prompt": "prompt",
        "n": "num_samples",
        "max_tokens": "sampling_params.max_tokens",
        "top_logprobs": "topk_prompt_logprobs",
    }
)


class SamplingSession(Struct, frozen=True, kw_only=True):
    """Name a model to sample from. Unknown fields are ignored."""

    session_id: str
    sampling_session_seq_id: int = 0
    base_model: str | None = None
    model_path: str | None = None


class FutureRequest(Struct, frozen=True, kw_only=True):
    """Name a future. Unknown fields are ignored."""

    request_id: str


async def _parse(request: Request, owner: str, max_bytes: int, message_type: Any) -> Any:
    async with received_body(request, owner, max_bytes) as body:
        return await body.parse_message(message_type)


@router.get("/healthz")
async def healthz(_: Owner) -> Response:
    """Say that the API answers."""
    return reply({"status": "ok"}, "json")


@router.get("/get_server_capabilities")
async def capabilities(_: Owner, models: ModelsDep) -> Response:
    """List the models that are served. None can be trained."""
    await models.live()
    shown = [{"model_name": name, "trainable": False, "sampleable": True} for name in models.names]
    return reply({"supported_models": shown}, "json")


@router.post("/client/config")
async def client_config(_: Owner) -> Response:
    """Leave every setting of the SDK at its default."""
    return reply({}, "json")


@router.post("/create_session")
async def create_session(_: Owner) -> Response:
    """Return the name of a session."""
    return reply({"type": "create_session", "session_id": uuid.uuid4().hex}, "json")


@router.post("/session_heartbeat")
async def session_heartbeat(_: Owner) -> Response:
    """Say that a session lives: nothing of it is kept, so it cannot end."""
    return reply({"type": "session_heartbeat"}, "json")


@router.post("/telemetry")
async def telemetry(_: Owner) -> Response:
    """Ignore what the SDK reports about itself."""
    return reply({"status": "accepted"}, "json")


@router.post("/sessions/{id}/finish")
async def finish_session(_: Owner) -> Response:
    """End a session, of which nothing was kept. Its jobs go on."""
    return Response(status_code=204)


@router.post("/create_sampling_session")
async def create_sampling_session(request: Request, owner: Owner, settings: SettingsDep, models: ModelsDep) -> Response:
    """Return the name of a sampling session, which has the model's. Raises ModelNotServed, BadRequest."""
    body: SamplingSession = await _parse(request, owner, settings.max_body_bytes, SamplingSession)
    if body.model_path is not None:
        raise BadRequest("model_path: no weights are saved here; expected `base_model`", "model_path")
    served = await models.find(body.base_model)
    name = f"{uuid.uuid5(uuid.NAMESPACE_OID, body.session_id).hex}:{max(0, body.sampling_session_seq_id)}"
    sampler = f"{name}:{body.base_model or served.id}"
    return reply({"type": "create_sampling_session", "sampling_session_id": sampler}, "json")


@router.get("/samplers/{id:path}")
async def sampler(sampler_id: SamplerId, _: Owner) -> Response:
    """Return the model of a sampling session."""
    found = SAMPLER.fullmatch(sampler_id)
    if found is None:
        raise NotFound(f"there is no sampling session {wire.quote(sampler_id)}", "id")
    return reply({"sampler_id": sampler_id, "base_model": found["model"], "model_path": None}, "json")


@router.post("/asample")
async def asample(
    request: Request, owner: Owner, settings: SettingsDep, models: ModelsDep, submission: SubmissionDep
) -> Response:
    """Submit a job. Sent again with the same number, the request gets the same job."""
    body: SampleRequest = await _parse(request, owner, settings.max_body_bytes, SampleRequest)
    served = await models.find(body.model)
    with building_requests(_FIELDS):
        job = to_request(body, served.id)
    with map_field_names(_FIELDS):
        [submitted] = await submission.submit(owner, [job], body.idempotency_key, is_bulk=False)
    future = str(Future.of(submitted.id, body))
    ids = [f"{submitted.id}:{index}" for index in range(body.num_samples)]
    return reply({"request_id": future, "sample_sequence_ids": ids}, "json")


@router.post("/retrieve_future")
async def retrieve_future(
    request: Request, owner: Owner, settings: SettingsDep, submission: SubmissionDep, held: HeldResultsDep
) -> Response:
    """Wait for a job, and return its result, its failure, or the advice to ask again."""
    body: FutureRequest = await _parse(request, owner, settings.max_body_bytes, FutureRequest)
    try:
        future = Future.parse(body.request_id)
    except ValueError as error:
        raise NotFound(str(error), "request_id") from None
    job = await submission.wait_for_job(request, owner, future.job_id, held, min(WAIT_S, settings.max_wait_s))
    if job.status not in ENDED:
        return reply({"type": "try_again", "request_id": body.request_id, "queue_state": "active"}, "json")
    if job.result is None:
        failure = job.failure or wire.Failure(code="canceled", message="the job was canceled")
        return reply(to_failure(failure), "json")
    if job.kind != "generate" or not has_shown(future, job.result):
        raise NotFound(f"request_id: there is no future {wire.quote(body.request_id)}", "request_id")
    result = job.result
    return Response(await held.run(lambda: to_reply(future, result)), media_type=CONTENT_TYPE)


@router.post("/cancel_future")
async def cancel_future(request: Request, owner: Owner, settings: SettingsDep, queue: QueueDep) -> Response:
    """Cancel a job. One that has ended stays as it is."""
    body: FutureRequest = await _parse(request, owner, settings.max_body_bytes, FutureRequest)
    with suppress(ValueError, ApiError):
        await queue.cancel(owner, Future.parse(body.request_id).job_id)
    return Response(status_code=204)
