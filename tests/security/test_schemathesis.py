"""schemathesis over the whole OpenAPI: no 5xx, and no answer that is not declared."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis

from tests.api.test_process import eventually, running
from tests.worker.conftest import Workers

CHECKS = [
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
]


def short_model(root: Path, folder: Path) -> Path:
    """The demo model with so short a context that even 128 answers that go to its end are there in seconds."""
    model = shutil.copytree(root / "scorepool" / "models" / "demo", folder / "demo")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 96}))
    return model


@pytest.mark.parametrize(
    "options",
    [
        ("--phases", "fuzzing", "--max-examples", "3", "--seed", "1"),
        pytest.param(
            ("--phases", "coverage,fuzzing,stateful", "--max-examples", "100"),
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
    ],
    ids=["briefly", "at length"],
)
def test_whatever_the_schema_allows_is_answered_as_it_says(
    root: Path, redis: Redis, redis_url: str, workers: Workers, tmp_path: Path, options: tuple[str, ...]
):
    pytest.importorskip("schemathesis", reason="schemathesis is not installed: it comes with the dev extra")
    workers.start(worker="BatchWorker", SCOREPOOL_MODEL=f"demo={short_model(root, tmp_path)}", SCOREPOOL_LEASE_S="20")
    with running(root, redis_url, tmp_path / "log") as (http, _):
        eventually(lambda: http.get("/readyz").json()["models"] == ["demo"], timeout_s=120)
        tool, document = Path(sys.executable).with_name("schemathesis"), f"{http.base_url}/openapi.json"
        command = [str(tool), "run", document, *options, "--continue-on-failure", "--no-color", "--request-timeout=90"]
        command += ["--suppress-health-check=all", "--generation-database=none"]  # a slow machine is no finding
        done = subprocess.run([*command, "--checks", ",".join(CHECKS)], cwd=tmp_path, capture_output=True, text=True)
    print(done.stdout[-3000:])
    assert done.returncode == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
