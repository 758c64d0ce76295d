"""Every comparison in bench/ runs to its end and prints ratios. The tests do not check speed."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def logs_of_other_tests() -> Iterator[None]:
    """Undo how a comparison silences the logs of its process."""
    engine = logging.getLogger("scorepool.engine")
    level = engine.level
    yield
    engine.setLevel(level)
    logging.disable(logging.NOTSET)


SLOW = (
    *(
        "adapters",
        "batch_order",
        "constrained",
        "job_queue",
        "latency",
        "linearity",
        "many_models",
        "memory",
        "profile",
    ),
    *("reload", "result_cache", "targets"),
)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "shared_prefix",
            "unique_prompts",
            "generate",
            "sparse_prefill",
            "speculation",
            "prefix_store",
            "through_queue",
            "client_decoding",
        ),
        *(pytest.param(name, marks=pytest.mark.soak) for name in SLOW),
    ],
)
def test_a_quick_run_prints_ratios(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out_option = ["--out", str(tmp_path)] if name == "linearity" else []
    monkeypatch.setattr(sys, "argv", [name, "--quick", *out_option])
    importlib.import_module(f"bench.{name}").main()
    printed = capsys.readouterr().out
    assert re.search(r"\d\.\d\dx|\d%", printed), printed
    assert "ratio" in printed
    assert "nan" not in printed


@pytest.mark.soak
def test_agreement_prints_its_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["agreement", "--quick"])
    importlib.import_module("bench.agreement").main()
    printed = capsys.readouterr().out
    assert re.search(r"\| llama \| default \| \d\.\de-0[5-9] .* \| exact \| .* \| to the bit \|", printed), printed


def test_linearity_writes_a_table_and_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["linearity", "--quick", "--out", str(tmp_path)])
    importlib.import_module("bench.linearity").main()
    assert "| tokens of one row | CPU s |" in (tmp_path / "linearity-demo.md").read_text()
    assert (tmp_path / "linearity-demo.png").read_bytes().startswith(b"\x89PNG")
