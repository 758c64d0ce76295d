"""schemathesis tests the whole OpenAPI document: no 5xx, and only declared responses."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from tests.api.test_process import eventually, running, serves
from tests.worker.conftest import Workers

CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
]


def short_model(root: Path, folder: Path) -> Path:
    """Copy the demo model with a context so short that 128 completions of full length take seconds."""
    model = shutil.copytree(root / "scorepool" / "models" / "demo", folder / "demo")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    return model


@pytest.mark.parametrize(
    "options",
    [
        ("--phases", "fuzzing", "--max-examples", "1", "--seed", "1"),
        pytest.param(
            ("--phases", "coverage,fuzzing,stateful", "--max-examples", "100"),
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
    ],
    ids=["short", "long"],
)
def test_every_request_that_the_schema_allows_gets_a_declared_response(
    root: Path, redis: Redis, redis_url: str, workers: Workers, tmp_path: Path, options: tuple[str, ...]
):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: it comes with the dev extra")
    workers.start(worker="BatchWorker", SCOREPOOL_MODEL=f"demo={short_model(root, tmp_path)}", SCOREPOOL_LEASE_S="20")
    with running(root, redis_url, tmp_path / "log") as (http, _):
        eventually(lambda: serves(http, "demo"), timeout_s=120)
        tool, document = Path(sys.executable).with_name("schemathesis"), f"{http.base_url}/openapi.json"
        command = [str(tool), "run", document, *options, "--continue-on-failure", "--no-color", "--request-timeout=90"]
        command += ["--suppress-health-check=all", "--generation-database=none"]  # a slow machine is not a finding
        completed = subprocess.run(
            [*command, "--checks", ",".join(CHECKS)], cwd=tmp_path, capture_output=True, text=True
        )
    print(completed.stdout[-3000:])
    assert completed.returncode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
