"""Declare what routes ask for in their signatures.

A route names the parts that it uses, such as `SubmissionDep`, and gets no other. All dependencies are async, because
FastAPI would run plain functions in a thread each.
"""

import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated
from urllib.request import parse_http_list

from fastapi import Depends, Query
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from redis.asyncio import Redis
from starlette.requests import Request

from scorepool import wire
from scorepool.api.auth import Keyring
from scorepool.api.http import formats
from scorepool.api.http.errors import BadRequest, Forbidden, NotAcceptable, Unauthorized
from scorepool.api.http.large_replies import HeldResults, held_results
from scorepool.api.job_replies import JobReplies
from scorepool.api.metrics.history import History
from scorepool.api.metrics.prometheus import Metrics
from scorepool.api.metrics.queue_snapshot import QueueSnapshots
from scorepool.api.repositories.adapters import Adapters
from scorepool.api.repositories.batches import Batches
from scorepool.api.repositories.decode import MAX_TIME_S
from scorepool.api.repositories.files import Files
from scorepool.api.repositories.jobs import Jobs
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.pages import CURSOR
from scorepool.api.repositories.pause import Pause
from scorepool.api.repositories.queue import Queue
from scorepool.api.repositories.readiness import Readiness
from scorepool.api.repositories.sessions import Sessions
from scorepool.api.repositories.waiting import Waiting
from scorepool.api.repositories.webhook_deliveries import WebhookDeliveries
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.api.repositories.webhook_secrets import WebhookSecrets
from scorepool.api.repositories.weights import Weights
from scorepool.api.state import State
from scorepool.api.streaming import Streaming
from scorepool.api.submission import Submission
from scorepool.store import Settings

_bearer = HTTPBearer(auto_error=False, description="An API key. Not asked for by a server without keys.")
_api_key = APIKeyHeader(
    name="x-api-key",
    auto_error=False,
    description="The same key, as Anthropic's clients send it: in place of the other.",
)
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def _state(request: Request) -> State:
    return request.app.state.scorepool  # type: ignore[no-any-return]


async def settings(request: Request) -> Settings:
    return _state(request).settings


async def keyring(request: Request) -> Keyring:
    return _state(request).keyring


async def redis_servers(request: Request) -> Sequence[Redis]:
    return _state(request).redis_servers


async def readiness(request: Request) -> Readiness:
    return _state(request).readiness


async def waiting(request: Request) -> Waiting:
    return _state(request).waiting


async def metrics(request: Request) -> Metrics:
    return _state(request).metrics


async def snapshots(request: Request) -> QueueSnapshots:
    return _state(request).snapshots


async def history(request: Request) -> History:
    return _state(request).history


async def models(request: Request) -> Models:
    return _state(request).models


async def adapters(request: Request) -> Adapters:
    return _state(request).adapters


async def jobs(request: Request) -> Jobs:
    return _state(request).jobs


async def queue(request: Request) -> Queue:
    return _state(request).queue


async def endpoints(request: Request) -> WebhookEndpoints:
    return _state(request).endpoints


async def webhook_secrets(request: Request) -> WebhookSecrets:
    return _state(request).webhook_secrets


async def deliveries(request: Request) -> WebhookDeliveries:
    return _state(request).deliveries


async def files(request: Request) -> Files:
    return _state(request).files


async def batches(request: Request) -> Batches:
    return _state(request).batches


async def sessions(request: Request) -> Sessions:
    return _state(request).sessions


async def weights(request: Request) -> Weights:
    return _state(request).weights


async def pause(request: Request) -> Pause:
    return _state(request).pause


async def submission(request: Request) -> Submission:
    return _state(request).submission


async def job_replies(request: Request) -> JobReplies:
    return JobReplies(_state(request).jobs, _state(request).stored_results)


async def streaming(request: Request) -> Streaming:
    return _state(request).streaming


async def owner(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    api_key: Annotated[str | None, Depends(_api_key)],
) -> str:
    """Return the owner that the API key stands for. Raises Unauthorized."""
    for name in ("Authorization", "x-api-key"):  # a proxy may have checked the other one
        if len(request.headers.getlist(name)) > 1:
            raise Unauthorized(f"there are several {name} headers: send one")
    bearer = credentials.credentials if credentials else None
    keyring = _state(request).keyring
    if keyring and None not in (bearer, api_key) and bearer != api_key:
        raise Unauthorized("there are two API keys, in `Authorization` and in `x-api-key`: send one")
    return keyring.owner(bearer or api_key)


async def reply_format(request: Request) -> wire.Format:
    """Choose the format of the reply before anything is done that could not be answered. Raises NotAcceptable."""
    try:
        return formats.accepted_format(request.headers.getlist("accept"))
    except ValueError as error:
        raise NotAcceptable(str(error), "Accept") from None


async def known_query(request: Request) -> None:
    """Refuse query parameters that the route does not have or that are given twice. Raises BadRequest."""
    dependant = request.scope["route"].dependant
    known = {parameter.alias for each in (dependant, *dependant.dependencies) for parameter in each.query_params}
    for name, times in Counter(name for name, _ in request.query_params.multi_items()).items():
        if name not in known:
            expected = f"expected {', '.join(sorted(known))}" if known else "this route has none"
            raise BadRequest(f"{wire.cut(name)}: unknown query parameter; {expected}", wire.cut(name))
        if times > 1 and not name.endswith("[]"):  # a list
            raise BadRequest(f"{name}: given {times} times, expected once", name)


async def beta(
    beta: Annotated[bool, Query(description="Has no effect. The beta clients of Anthropic's SDK send it.")] = False,
) -> None:
    """Accept the query parameter of beta clients. Fields of betas are refused by name."""


async def idempotency_key(request: Request) -> str | None:
    """Read the Idempotency-Key header. Raises BadRequest."""
    keys = request.headers.getlist("idempotency-key")
    if len(keys) > 1:
        raise BadRequest(f"Idempotency-Key: given {len(keys)} times, expected once", "Idempotency-Key")
    key = keys[0] if keys else None
    if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
        raise BadRequest(
            "Idempotency-Key: expected 1 to 255 printable ASCII characters without spaces, "
            f"found {len(key)} characters",
            "Idempotency-Key",
        )
    return key


async def preferred_wait_s(request: Request) -> int | None:
    """Read N of `Prefer: wait=N` (RFC 7240). Other preferences are ignored, as the RFC asks. Raises BadRequest."""
    for header in request.headers.getlist("prefer"):
        for preference in parse_http_list(header):  # a comma between quotes separates nothing
            name, _, value = preference.partition(";")[0].partition("=")
            if name.strip().lower() == "wait":
                seconds = value.strip().strip('"')
                if not (seconds.isascii() and seconds.isdecimal() and len(seconds) <= 9):
                    raise BadRequest(
                        f"Prefer: expected wait=<whole seconds>, found {wire.quote(preference.strip())}", "Prefer"
                    )
                return int(seconds)
    return None


SettingsDep = Annotated[Settings, Depends(settings)]
KeyringDep = Annotated[Keyring, Depends(keyring)]
RedisServersDep = Annotated[Sequence[Redis], Depends(redis_servers)]
ReadinessDep = Annotated[Readiness, Depends(readiness)]
WaitingDep = Annotated[Waiting, Depends(waiting)]
MetricsDep = Annotated[Metrics, Depends(metrics)]
SnapshotsDep = Annotated[QueueSnapshots, Depends(snapshots)]
HistoryDep = Annotated[History, Depends(history)]
ModelsDep = Annotated[Models, Depends(models)]
AdaptersDep = Annotated[Adapters, Depends(adapters)]
JobsDep = Annotated[Jobs, Depends(jobs)]
QueueDep = Annotated[Queue, Depends(queue)]
WebhookEndpointsDep = Annotated[WebhookEndpoints, Depends(endpoints)]
WebhookSecretsDep = Annotated[WebhookSecrets, Depends(webhook_secrets)]
WebhookDeliveriesDep = Annotated[WebhookDeliveries, Depends(deliveries)]
FilesDep = Annotated[Files, Depends(files)]
BatchesDep = Annotated[Batches, Depends(batches)]
SessionsDep = Annotated[Sessions, Depends(sessions)]
WeightsDep = Annotated[Weights, Depends(weights)]
PauseDep = Annotated[Pause, Depends(pause)]
SubmissionDep = Annotated[Submission, Depends(submission)]
JobRepliesDep = Annotated[JobReplies, Depends(job_replies)]
StreamingDep = Annotated[Streaming, Depends(streaming)]

Owner = Annotated[str, Depends(owner)]


async def operator(owner: Owner, request: Request) -> str:
    """Return the owner, whose key is an operator's. On a server without keys everybody is one. Raises Forbidden."""
    state = _state(request)
    names = [name.strip() for name in state.settings.operator_keys.split(",")]
    if state.keyring and owner not in names:
        raise Forbidden(
            "only the keys that SCOREPOOL_OPERATOR_KEYS names may change weights and adapters, and pause the server"
        )
    return owner


Operator = Annotated[str, Depends(operator)]


async def results(owner: Owner) -> AsyncGenerator[HeldResults]:
    """Count the results that the request reads, until its reply has been sent."""
    with held_results(owner) as held:
        yield held


HeldResultsDep = Annotated[HeldResults, Depends(results)]
ReplyFormat = Annotated[wire.Format, Depends(reply_format)]
IdempotencyKey = Annotated[str | None, Depends(idempotency_key)]
PreferredWait = Annotated[int | None, Depends(preferred_wait_s)]
WaitS = Annotated[
    float, Query(alias="wait", ge=0, allow_inf_nan=False, description="Seconds to wait until the job has ended.")
]
Cursor = Annotated[
    str | None, Query(description="`next_cursor` of the previous page.", json_schema_extra={"pattern": CURSOR})
]
UnixTime = Annotated[float | None, Query(ge=0, le=MAX_TIME_S, description="Unix time, in seconds.")]
Limit = Annotated[int, Query(ge=1, le=200)]
