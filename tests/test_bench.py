"""Every comparison in bench/ runs to its end and prints ratios. The tests do not check speed."""

import importlib
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import bench.model_table.__main__ as model_table
from bench import llama_cpp
from bench.model_table import shapes, table
from bench.model_table.measure import Ratios, Row


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
    *("reload", "result_cache", "spread", "targets"),
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


@pytest.mark.soak
def test_a_table_of_models_has_a_row_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["models", "--quick", "--machine", "Mac A", "--out", str(tmp_path)])
    model_table.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| Mac A | tiny")]
    assert [line.split(" | ")[2] for line in lines] == ["4", "32"]
    ratios = [re.findall(r"\d+\.\d\d, \d+\.\d\d", line) for line in lines]
    assert [len(found) for found in ratios] == [3 if llama_cpp.IS_INSTALLED else 2] * 2
    assert (tmp_path / "models-mac-a.json").exists()


def test_tables_of_several_machines_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    beside = {"mlx_lm": Ratios(1.25, 0.98, 1.75), "llama.cpp": Ratios(0.5, 0.75)}
    row = Row("tiny", 10**6, 4, 64, 8, 3, 100.0, 20.0, 0.64, 0.05, 1.5, 3.0, beside)
    slower = msgspec.structs.replace(row, bits=32, beside={})
    files = [
        table.save(tmp_path, table.Results(machine, "metal (M2)", {"mlx": "0.32.4"}, "2026-11-26", rows))
        for machine, rows in (("Mac A", [row]), ("Mac B", [slower]), ("Mac A", [slower]))
    ]
    assert [path.name for path in files] == ["models-mac-a.json", "models-mac-b.json", "models-mac-a.json"]

    monkeypatch.setattr(sys, "argv", ["models", "--merge", *map(str, files[:2]), "--out", str(tmp_path)])
    model_table.main()

    page = (tmp_path / "models.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| Mac")] == [
        "| Mac A | tiny (0.00 B) | 4 | 100.0 | 20.00 | 0.64 | 0.050 | +3 % | 1.50 | 1.75 | 1.25, 0.98 | – | 0.50, 0.75 |",  # noqa: E501
        "| Mac A | tiny (0.00 B) | 32 | 100.0 | 20.00 | 0.64 | 0.050 | +3 % | 1.50 | – | – | – | – |",
        "| Mac B | tiny (0.00 B) | 32 | 100.0 | 20.00 | 0.64 | 0.050 | +3 % | 1.50 | – | – | – | – |",
    ]
    (tmp_path / "models-x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"models-x\.json is no table of models"):
        table.load([tmp_path / "models-x.json"])


def test_every_shape_is_one_that_mlx_lm_builds_with_its_published_size():
    sizes = {"qwen2.5-0.5b": 0.494, "qwen3-0.6b": 0.596, "gemma3-1b": 1.0, "llama3.2-1b": 1.236, "qwen2.5-1.5b": 1.544}
    sizes |= {"smollm2-1.7b": 1.711, "qwen3-1.7b": 1.72, "llama3.2-3b": 3.213, "qwen3-4b": 4.022, "llama3.1-8b": 8.03}
    sizes |= {"qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-30b-a3b": 30.532}
    assert {name: shapes.num_parameters(name) / 1e9 for name in sizes} == pytest.approx(sizes, rel=1e-3)
    assert shapes.SHAPES.keys() - sizes.keys() == {"tiny"}


@pytest.mark.soak
def test_a_quick_simulation_of_a_fleet_prints_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["fleet_simulation", "--quick", "--without-check"])
    importlib.import_module("bench.fleet_simulation.__main__").main()
    found = capsys.readouterr().out
    assert re.search(r"\| `claim` \| \d+\.\d\d \|", found)
    rows = re.findall(r"\| ([^|]+) \| (10|30) \| (\d+) \| (\d+) \| (\d+)% \|", found)
    assert len(rows) == 8
    for name, _, submitted, ended, _ in rows:
        assert "1,000" in name or 0.7 < int(ended) / int(submitted) < 1.3
