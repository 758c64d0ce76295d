"""OpenAI's SDK raises its own exception for each way in which a request fails."""

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from redis import Redis
from rq.job import JobStatus

from scorepool import wire
from tests.api.conftest import ALICE, KEYS, Serving, bearer, eventually, generate
from tests.api.fake_worker import FakeWorker
from tests.api.test_process import running

pytestmark = pytest.mark.anyio


def sdk_of(http: httpx.AsyncClient, key: str = ALICE) -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key=key, http_client=http, max_retries=0)


async def complete(sdk: AsyncOpenAI, prompt: object = "a", **options: object) -> object:
    return await sdk.completions.create(model="demo", prompt=prompt, **options)


async def test_a_wrong_key_and_a_large_body_and_a_full_queue(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, max_queue_depth=2, max_body_bytes=2000, max_bulk_jobs=5) as http:
        with pytest.raises(openai.AuthenticationError) as unknown:
            await complete(sdk_of(http, "wrong"))
        assert unknown.value.type == "authentication_error"

        with pytest.raises(openai.APIStatusError) as large:
            await complete(sdk_of(http), "a" * 3000)
        assert large.value.status_code == 413
        with pytest.raises(openai.APIStatusError, match="at most 5 prompts"):
            await complete(sdk_of(http), ["a"] * 6)

        await http.post("/v1/jobs", json=generate(), headers=bearer(ALICE))
        with pytest.raises(openai.RateLimitError) as full:
            await complete(sdk_of(http), ["a", "b"])
        assert full.value.type == "rate_limit_error"
        assert int(full.value.response.headers["Retry-After"]) > 0


async def test_a_body_above_the_limit_is_a_413_for_both_clients_of_the_sdk(
    root: Path, redis: Redis, redis_url: str, tmp_path: Path
):
    """A real server: a connection that it closes while the client still sends would be a network error."""
    FakeWorker(redis).register()
    with running(root, redis_url, tmp_path / "log", max_body_bytes="100000") as (http, _):
        options = {"base_url": f"{str(http.base_url).rstrip('/')}/v1", "api_key": "x", "max_retries": 0}
        call = {"model": "demo", "prompt": "a" * 20_000_000}
        for _ in range(3):
            with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes") as large:
                await asyncio.to_thread(openai.OpenAI(**options).completions.create, **call)
            with pytest.raises(openai.APIStatusError, match="larger than 100000 bytes") as large_async:
                await AsyncOpenAI(**options).completions.create(**call)
            assert (large.value.status_code, large_async.value.status_code) == (413, 413)
            assert large_async.value.request_id


@pytest.mark.parametrize(
    ("failure", "status", "error"),
    [
        (wire.Failure(code="invalid", message="no", field="prompt"), JobStatus.FAILED, openai.BadRequestError),
        (wire.Failure(code="too_long", message="too long"), JobStatus.FAILED, openai.BadRequestError),
        (wire.Failure(code="canceled", message="canceled"), JobStatus.STOPPED, openai.ConflictError),
        (wire.Failure(code="numeric", message="NaN"), JobStatus.FAILED, openai.InternalServerError),
        (wire.Failure(code="timeout", message="slow"), JobStatus.FAILED, openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_job_is_an_exception_and_cancels_the_requests_other_jobs(
    serving: Serving,
    worker: FakeWorker,
    failure: wire.Failure,
    status: JobStatus,
    error: type[openai.APIStatusError],
    stream: bool,
):
    async def call(sdk: AsyncOpenAI) -> None:
        answer = await complete(sdk, ["a", "b"], stream=stream)
        async for _ in answer:  # only reached by a stream
            pass

    async with serving() as http:
        calling = asyncio.create_task(call(sdk_of(http)))
        await eventually(lambda: len(worker.waiting()) == 2)
        first, second = worker.waiting()
        worker.end(first, failure, status)
        with pytest.raises(error, match=failure.message) as caught:
            await calling
        assert caught.value.body["code"]
        assert (await http.get(f"/v1/jobs/{second}")).json()["status"] == "canceled"


@pytest.mark.parametrize("options", [{}, {"stream": True}])
async def test_a_request_that_waits_too_long_is_canceled_and_answered_with_503(
    serving: Serving, worker: FakeWorker, options: dict[str, bool]
):
    async def call(sdk: AsyncOpenAI) -> None:
        async for _ in await complete(sdk, **options):
            pass

    said = r"no answer within 0.1 s \(SCOREPOOL_MAX_WAIT_S\): the job still waited in its queue"
    async with serving(max_wait_s=0.1) as http:
        with pytest.raises(openai.InternalServerError, match=said):
            await call(sdk_of(http))
        [job] = (await http.get("/v1/jobs")).json()["jobs"]
        assert job["status"] == "canceled"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_whose_job_runs_for_too_long_is_told_so(serving: Serving, worker: FakeWorker, stream: bool):
    async with serving(max_wait_s=1) as http:
        calling = asyncio.create_task(complete(sdk_of(http), stream=stream))
        await eventually(worker.waiting)
        [job_id] = worker.waiting()
        worker.start(job_id)
        with pytest.raises(openai.InternalServerError, match="the job was still running, so the request was canceled"):
            await calling


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_a_stopping_server_does_not_answer_is_told_so(
    serving: Serving, worker: FakeWorker, stream: bool
):
    async with serving() as http:
        calling = asyncio.create_task(complete(sdk_of(http), stream=stream))
        await eventually(worker.waiting)
        http._transport.app.state.scorepool.waiting.release()
        with pytest.raises(openai.InternalServerError, match="this server stops") as stopped:
            await calling
    assert (stopped.value.status_code, worker.waiting()) == (503, set())


async def test_an_unknown_model_has_one_code_on_every_route_of_openai(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        sdk = sdk_of(http)
        assert (await sdk.models.retrieve("demo")).id == "demo"
        for call in (sdk.models.retrieve("other"), sdk.completions.create(model="other", prompt="a")):
            with pytest.raises(openai.NotFoundError, match="live models: demo") as unknown:
                await call
            assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/scorepool/models/demo", "/tokenize"])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
async def test_a_wrong_method_is_an_error_in_the_same_format(serving: Serving, path: str, method: str):
    async with serving() as http:
        error = (await http.request(method, path)).json()["error"]

    assert error["type"] == "invalid_request_error"
    assert error["message"]
