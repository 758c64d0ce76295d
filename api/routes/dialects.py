"""Serve the routes of every dialect: one handler runs any Endpoint (see api/dialects/protocol.py).

    body ─parse─► [continue] ─► count ─► [texts to token ids] ─► to_requests ─► submit ─┬─ wait ─────► to_reply
                                                                                        ├─ stream ───► to_events
                                                           in the background: to_kept_reply, to_kept_events

Top logprobs above the server's cap are clamped first. The jobs are counted, and their model is looked up, before the
first is built.

A stream's status waits for the first event of every job (see `_first_events`), so that a request of which a worker
refuses any part gets the status of its error. A failure after that is an error event in the stream.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from scorepool import wire
from scorepool.api.dependencies import (
    HeldResultsDep,
    JobsDep,
    ModelsDep,
    Owner,
    SettingsDep,
    StreamingDep,
    SubmissionDep,
    beta,
    known_query,
)
from scorepool.api.dialects.deltas import Diverged
from scorepool.api.dialects.protocol import (
    Chat,
    Context,
    Dialect,
    Endpoint,
    EventWriter,
    Previous,
    ReplyTooLarge,
    StreamEvent,
)
from scorepool.api.event_cursor import EventCursor
from scorepool.api.http import openapi
from scorepool.api.http.bodies import received_body, while_connected
from scorepool.api.http.errors import (
    BadRequest,
    NotFound,
    TooLarge,
    begun_again,
    building_requests,
    map_codes,
    map_field_names,
)
from scorepool.api.http.formats import reply
from scorepool.api.http.large_replies import HeldResults, held_results
from scorepool.api.http.sse import EventStream
from scorepool.api.kept_events import kept_events
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.streaming import Streaming
from scorepool.api.submission import Submission

SYNCHRONOUS_ERRORS = (400, 401, 404, 409, 413, 415, 429, 503)
BACKGROUND_TIMEOUT_S = 3600  # of a job whose client does not wait
MAX_CONTINUED_BYTES = 64 * 2**20  # of the responses that a body names, with which another may be read
MAX_INLINE_TOKENS = 4096  # of results whose reply is built on the event loop
MAX_HELD_TOKENS = 16_384  # of one request, before its status is sent: about 30 MB with 20 top logprobs each

AnyEndpoint = Endpoint[Any]


def router_of(dialect: Dialect) -> APIRouter:
    """Build the routes of a dialect."""
    router = APIRouter(dependencies=[Depends(known_query), *([Depends(beta)] if dialect.form == "anthropic" else ())])
    for endpoint in dialect.endpoints:
        events = () if endpoint.chunk_type is None else openapi.stream_events(endpoint.chunk_type, dialect.form)
        replies = {} if endpoint.reply_type is None else {200: endpoint.reply_type}
        handler = _handler(endpoint, dialect.error_codes)
        for path in endpoint.other_paths:
            router.add_api_route(path, handler, methods=["POST"], include_in_schema=False)
        router.add_api_route(
            endpoint.path,
            handler,
            methods=["POST"],
            name=endpoint.name,
            tags=[endpoint.tag or dialect.tag],
            summary=endpoint.summary,
            description=endpoint.description,
            responses=openapi.responses(replies, SYNCHRONOUS_ERRORS, events, dialect.form),
            openapi_extra=openapi.request_body(endpoint.body_types, endpoint.example),
        )
    return router


def _handler(endpoint: AnyEndpoint, error_codes: dict[str, str]) -> Callable[..., Any]:
    async def handle(
        request: Request,
        owner: Owner,
        settings: SettingsDep,
        models: ModelsDep,
        submission: SubmissionDep,
        streaming: StreamingDep,
        held: HeldResultsDep,
        jobs: JobsDep,
    ) -> Response:
        with map_codes(error_codes):
            body = await _read(endpoint, request, owner, settings.max_body_bytes)
            body = await _continued(endpoint, body, owner, jobs)
            asked = body
            body = endpoint.clamp_top_logprobs(asked, settings.max_top_logprobs)
            clamped_to = UNSET if body is asked else settings.max_top_logprobs
            return await _run(endpoint, body, clamped_to, request, owner, models, submission, streaming, held)

    return handle


async def _read(endpoint: AnyEndpoint, request: Request, owner: str, max_bytes: int) -> Any:
    """Read and parse the body. Its bytes are not kept while its jobs run."""

    def parse(content: bytes, message_format: wire.Format) -> Any:
        if form := endpoint.error_form(content, message_format):
            request.scope["error_form"] = form
        return endpoint.parse(content, message_format)

    async with received_body(request, owner, max_bytes) as body:
        return await body.parse(parse)


async def _continued(endpoint: AnyEndpoint, body: Any, owner: str, jobs: Jobs) -> Any:
    """Return the body with what it continues, if anything. Raises BadRequest, TooManyResults."""
    try:
        fields = endpoint.previous_jobs(body)
        if not fields:
            return body
        previous: dict[str, Previous] = {}
        with held_results(owner) as held:
            for job_id, field in fields.items():
                if held.num_bytes > MAX_CONTINUED_BYTES:
                    sentence = f"the responses that are named before it have more than {MAX_CONTINUED_BYTES} bytes"
                    raise BadRequest(f"{field}: {sentence}; name fewer", field)
                previous[job_id] = await _previous(job_id, field, owner, jobs, held)
            return await held.run(lambda: endpoint.continued(body, previous))
    except wire.Invalid as error:
        raise BadRequest(error.message, error.field) from None


async def _previous(job_id: str, field: str, owner: str, jobs: Jobs, held: HeldResults) -> Previous:
    """Read a job that the field of a body names. Raises BadRequest, TooManyResults."""
    absent = BadRequest(f"{field}: no such response; they are kept for a limited time after their end", field)
    absent.code = "previous_response_not_found"
    try:
        job = await jobs.read(owner, job_id, held)
    except NotFound:
        raise absent from None
    kept = await jobs.read_kept_body(job_id, held)
    if kept is None:
        raise absent
    if job.result is None:
        raise BadRequest(f"{field}: that response has no answer, it is {job.status}", field)
    return Previous(kept, job.result)


async def _run(
    endpoint: AnyEndpoint,
    body: Any,
    max_top_logprobs: int | UnsetType,
    request: Request,
    owner: str,
    models: Models,
    submission: Submission,
    streaming: Streaming,
    held: HeldResults,
) -> Response:
    count = endpoint.job_count(body)
    submission.check_count(*count)
    served_model = await models.find(body.model)

    def field_name(name: str) -> str:
        return endpoint.field_name(body, name)

    limit_s = BACKGROUND_TIMEOUT_S if endpoint.is_in_background(body) else submission.time_limit_s
    kept_body = endpoint.kept_body(body)
    texts = (_to_tokenize(text, served_model.id, limit_s) for text in endpoint.texts_to_encode(body, served_model))
    with building_requests(field_name):
        tokenizes = await submission.build(texts, count.field)
    encoded = await submission.submit_and_wait(request, owner, tokenizes, held, field_name) if tokenizes else []
    [unique_id] = await submission.job_ids(owner, None, 1, served_model.id)
    context = Context(
        unique_id=unique_id,
        timeout_s=limit_s,
        created=int(await models.now_s()),
        served_model=served_model,
        encoded_texts=[result.sequences[0].token_ids for result in encoded],
        is_kept=bool(kept_body),
        max_top_logprobs=max_top_logprobs,
    )
    try:
        with building_requests(field_name):
            requests = await submission.build(endpoint.to_requests(body, context), count.field)
    except ReplyTooLarge as error:
        raise TooLarge(error.message, error.field) from None
    key = endpoint.idempotency_key(body)
    model = served_model.id
    ids = [unique_id] if kept_body else await submission.job_ids(owner, key, len(requests), model)
    if endpoint.is_in_background(body):
        with map_field_names(field_name):
            [job] = await submission.submit(owner, requests, None, ids, is_bulk=False, kept_body=kept_body)
        queued = _queued(job.id, served_model.id, context.created)
        if endpoint.is_streamed(body):
            followed = streaming.follow(owner, queued, EventCursor.parse(""), held)
            kept_writer = endpoint.to_kept_events(body, queued)
            events = kept_events(followed, kept_writer, held)
            return EventStream(request, events, b"", partial(endpoint.to_error_event, kept_writer))
        return reply(endpoint.to_kept_reply(body, queued), "json")
    if endpoint.is_streamed(body):
        events = streaming.submit_and_stream(owner, requests, ids, held, field_name, key, kept_body)
        return await _stream(request, events, ids, endpoint, endpoint.to_events(body, ids, context))
    results: list[wire.Result] = []
    if requests:
        results = await submission.submit_and_wait(request, owner, requests, held, field_name, key, ids, kept_body)
    is_large = endpoint.has_large_replies or sum(result.num_tokens for result in results) > MAX_INLINE_TOKENS
    return await held.reply(lambda: endpoint.to_reply(body, results, context), "json", is_large=is_large)


def _queued(job_id: str, model: str, created: int) -> wire.Job:
    return wire.Job(id=job_id, kind="generate", model=model, status="queued", created_at=float(created))


def _to_tokenize(text: str | Chat, model: str, timeout_s: int) -> wire.Tokenize:
    """Build the job that encodes a text or a chat, ahead of other jobs."""
    if isinstance(text, str):
        return wire.Tokenize(model=model, prompt=text, priority="high", timeout_s=timeout_s)
    return wire.Tokenize(
        model=model,
        messages=text.messages,
        tools=text.tools,
        chat_template_kwargs=text.chat_template_kwargs,
        priority="high",
        timeout_s=timeout_s,
    )


async def _stream(
    request: Request,
    events: AsyncGenerator[StreamEvent | None],
    job_ids: Sequence[str],
    endpoint: AnyEndpoint,
    writer: EventWriter,
) -> Response:
    """Answer when every job has begun. If the client disconnects before that, the jobs are canceled."""
    await anext(events)  # The jobs are accepted. A client that leaves while they are submitted is noticed only now.
    chunks = _chunks(events, job_ids, writer)
    try:
        await while_connected(request, _wait_for_status(chunks))
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(request, chunks, b"", partial(endpoint.to_error_event, writer))


async def _wait_for_status(chunks: AsyncGenerator[object | None]) -> None:
    await anext(chunks)


async def _chunks(
    events: AsyncGenerator[StreamEvent | None], job_ids: Sequence[str], writer: EventWriter
) -> AsyncGenerator[object | None]:
    """Yield None when the status can be sent, then the chunks of all events.

    None is yielded again when there is nothing to send. Closing this generator cancels the jobs. Raise ApiError if a
    job fails.
    """
    async with aclosing(events):
        try:
            held = await _first_events(events, job_ids)
            yield None
            for event in held:
                for chunk in writer.add(event):
                    yield chunk
            async for later in events:
                chunks = [] if later is None else writer.add(later)
                for chunk in chunks:
                    yield chunk
                if not chunks:
                    yield None
            for chunk in writer.end():
                yield chunk
        except wire.Invalid as error:
            raise BadRequest(error.message, error.field) from None
        except Diverged:
            raise begun_again() from None


async def _first_events(events: AsyncGenerator[StreamEvent | None], job_ids: Sequence[str]) -> list[StreamEvent]:
    """Return all events up to the one with which the last job begins. Raise ApiError if a job fails before that.

    Return earlier with MAX_HELD_TOKENS: jobs that do not fit into the workers' batches begin when others have ended, so
    waiting for the last one would hold nearly the whole answer in memory.
    """
    held: list[StreamEvent] = []
    not_begun, num_tokens = set(job_ids), 0
    async for event in events:
        if event is None:
            continue
        held.append(event)
        not_begun.discard(event.id)
        num_tokens += len(event.token_ids) if isinstance(event, wire.TokenDelta) else 0
        if not not_begun or num_tokens >= MAX_HELD_TOKENS:
            break
    return held
