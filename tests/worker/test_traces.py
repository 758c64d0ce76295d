"""Every hop of a job is a span of one trace, sent by real processes to a collector; off, nothing of it is loaded."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from redis import Redis

from scorepool import wire
from scorepool.local.demo import free_port
from scorepool.local.stack import webhook_command
from tests.api.conftest import SECRET, score
from tests.api.test_process import eventually, is_ready
from tests.worker.conftest import Workers, outcome
from tests.worker.receiver import receiver

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """An OTLP collector that keeps spans by name."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # with the service's name
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for of_process in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = {one.key: one.value.string_value for one in of_process.resource.attributes}
                    for scope in of_process.scope_spans:
                        collector.spans += [(names["service.name"], span) for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def of(self, job_id: str) -> dict[str, tuple[str, Any, dict[str, Any]]]:
        """Return the spans of a job by name, each with the service that sent it and its attributes."""
        found = {}
        for service, span in self.spans:
            about = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
            if about.get("scorepool.job.id") == job_id:
                assert span.name not in found
                found[span.name] = (service, span, about)
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


def test_the_hops_of_a_job_are_one_trace_of_its_client(
    redis: Redis, redis_url: str, root: Path, workers: Workers, collector: Collector, tmp_path: Path
):
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100", "SCOREPOOL_TRACES": "otlp"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SCOREPOOL_", "RQ_"))}
    environ = {
        **kept,
        **otel,
        "PYTHONPATH": str(root),
        "SCOREPOOL_REDIS_URL": redis_url,
        "RQ_REDIS_URL": redis_url,
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_WEBHOOK_SECRET": SECRET,
        "SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "true",
    }
    workers.start("--name", "mac", SCOREPOOL_LEASE_S="20", **otel)
    commands = [[sys.executable, "-m", "scorepool.api"], webhook_command()]
    with (tmp_path / "processes").open("wb") as log:
        processes = [subprocess.Popen(command, cwd=root, env=environ, stdout=log, stderr=log) for command in commands]
    prompt = "what-the-prompt-says"
    try:
        url = f"http://127.0.0.1:{environ['SCOREPOOL_PORT']}"
        with receiver() as hook, httpx.Client(base_url=url, timeout=30, trust_env=False) as http:
            eventually(lambda: is_ready(http) and http.get("/v1/models").json()["models"])
            generate = {"type": "generate", "model": "demo", "prompt": prompt, "max_tokens": 3, "webhook": hook.url}
            traced = http.post("/v1/jobs", json=generate, headers={"traceparent": CLIENT}).json()["id"]
            failed = http.post("/v1/jobs", json=generate | {"prompt": "NAN", "max_tokens": 2}).json()["id"]
            bulk = http.post("/v1/jobs/bulk", json=[score(), score()], headers={"traceparent": "garbage"}).json()
            eventually(lambda: all(outcome(redis, job_id) for job_id in (traced, failed, bulk[0]["id"], bulk[1]["id"])))
            eventually(lambda: len(hook.received) == 2)
            eventually(lambda: len(collector.of(traced)) == len(collector.of(failed)) == 5)
            eventually(lambda: len(collector.of(bulk[1]["id"])) == 3)
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    spans = collector.of(traced)
    services = {name: service for name, (service, _, _) in spans.items()}
    assert services == {
        "submit demo": "scorepool-api",
        "queue": "scorepool-worker",
        "text_completion demo": "scorepool-worker",
        "commit": "scorepool-worker",
        "webhook": "scorepool-webhooks",
    }
    submit = spans["submit demo"][1]
    assert submit.trace_id.hex() == CLIENT.split("-")[1]
    assert submit.parent_span_id.hex() == CLIENT.split("-")[2]
    for name, (_, span, _) in spans.items():
        assert span.trace_id == submit.trace_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert name == "submit demo" or span.parent_span_id == submit.span_id
    queue, run, commit = (spans[name][1] for name in ("queue", "text_completion demo", "commit"))
    assert queue.end_time_unix_nano == run.start_time_unix_nano
    assert run.end_time_unix_nano == commit.start_time_unix_nano
    about = spans["text_completion demo"][2]
    result = outcome(redis, traced)
    assert isinstance(result, wire.Result)
    assert about["gen_ai.operation.name"] == "text_completion"
    assert about["gen_ai.request.model"] == about["gen_ai.response.model"] == "demo"
    assert about["gen_ai.usage.input_tokens"] == result.usage.prompt_tokens
    assert about["gen_ai.usage.output_tokens"] == result.usage.completion_tokens == 3
    assert spans["submit demo"][2]["gen_ai.request.max_tokens"] == 3
    assert spans["webhook"][2]["http.response.status_code"] == 204

    assert collector.of(failed)["text_completion demo"][2]["error.type"] == "numeric"
    assert collector.of(failed)["submit demo"][1].trace_id != submit.trace_id
    in_bulk = [collector.of(one["id"]) for one in bulk]
    assert len({spans["score demo"][1].trace_id for spans in in_bulk}) == 1
    assert all(spans["score demo"][1].parent_span_id for spans in in_bulk)
    everything = str(collector.spans)
    assert prompt not in everything
    assert hook.url not in everything


def test_traces_need_their_extra_and_the_error_names_it(root: Path):
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from scorepool.store import Settings, SettingsError\n"
        "from scorepool.store.traces import open_tracer\n"
        "assert open_tracer(Settings(), 'api') is None\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.sdk.', 'scorepool.store.otel'))]\n"
        "try: open_tracer(Settings(traces='otlp'), 'api')\n"
        "except SettingsError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert "run `pip install 'scorepool[otel]'`" in done.stdout, done.stderr


def test_a_collector_that_is_away_holds_up_neither_jobs_nor_the_end(redis: Redis, workers: Workers):
    away = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}", "SCOREPOOL_TRACES": "otlp"}
    worker = workers.start("--name", "mac", SCOREPOOL_LEASE_S="20", **away)
    eventually(lambda: bool(redis.keys("scorepool:card:*")))
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
