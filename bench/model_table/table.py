"""Rows as JSON, one file a machine and command, and the table of all files. Pure but for reading and writing files."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from bench.model_table.measure import Ratios, Row

MAX_LOAD = 4.0  # beyond it the page says so
PEERS = ("mlx_lm", "mlx_lm.server", "llama.cpp")
_COLUMNS = (
    *("machine", "model", "bits", "prefill tokens/s", "decode tokens/s", "first token cold, s", "prompt cached, s"),
    *("top-20's cost", "peak memory, GiB", "mlx_lm's", *(f"x {peer}: prefill, decode" for peer in PEERS)),
)
_INTRODUCTION = """# Models

One stream on random weights in the shapes of published models: the times are those of the shapes. Medians; `x mlx_lm`
is the median ratio of runs that took turns in one session, of prefill and of decoding, above 1 scorepool is faster.
Prompt cached: the first token of a prompt that was seen twice before. Top-20's cost: of decoding, with the 20 most
likely tokens reported. Memory is MLX's, weights included. mlx_lm runs in the process that times it, as scorepool does,
mlx_lm.server behind HTTP. llama.cpp has the same weights, in 4 bits by its own rule (Q4_0).
`python -m bench.models --merge FILES` writes this page from the files of several machines.

"""


class Results(Struct, frozen=True):
    """What was measured on one machine."""

    machine: str
    backend: str
    versions: dict[str, str]
    date: str  # ISO 8601
    rows: list[Row]


def file_name(machine: str) -> str:
    return f"models-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.json"


def load(paths: Iterable[Path]) -> list[Results]:
    """Read files that `save` wrote. Raises ValueError with the path of one that is none."""
    found: list[Results] = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Results))
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is no table of models: {error}") from None
    return found


def save(folder: Path, results: Results) -> Path:
    """Write a machine's file. Rows of models that it had before and that were not measured now stay."""
    path = folder / file_name(results.machine)
    measured = {(row.shape, row.bits) for row in results.rows}
    kept = [row for old in load([path] if path.exists() else []) for row in old.rows]
    rows = [*(row for row in kept if (row.shape, row.bits) not in measured), *results.rows]
    rows.sort(key=lambda row: (row.parameters, row.shape, row.bits))
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(results, rows=rows))) + b"\n")
    return path


def render(machines: Iterable[Results]) -> str:
    """Return the page."""
    results = list(machines)
    lines = [_line(one.machine, row) for one in results for row in one.rows]
    head = f"| {' | '.join(_COLUMNS)} |\n{'|---' * len(_COLUMNS)}|\n"
    return _INTRODUCTION + head + "".join(lines) + "\n" + "".join(map(_conditions, results))


def _conditions(one: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    sizes = sorted({(row.prompt_tokens, row.generated_tokens, row.runs) for row in one.rows})
    work = "; ".join(f"{prompt:,} prompt tokens, {made} generated, {runs} runs" for prompt, made, runs in sizes)
    load = max(row.load for row in one.rows)
    crowded = f"load average up to {load:g}: times of a crowded machine; " if load > MAX_LOAD else ""
    commands = ", ".join(f"`{command}`" for command in dict.fromkeys(row.command for row in one.rows))
    return f"- {one.machine}: {one.backend}; {versions}; {work}; {crowded}{one.date}. {commands}\n"


def _line(machine: str, row: Row) -> str:
    mlx_lm = row.beside.get("mlx_lm")
    cells = (
        machine,
        f"{row.shape} ({row.parameters / 1e9:.2f} B)",
        str(row.bits),
        f"{row.prefill_speed:,.1f}",
        f"{row.decode_speed:,.2f}",
        f"{row.first_cold_s:.2f}",
        "–" if row.first_cached_s is None else f"{row.first_cached_s:.3f}",
        f"{row.top20_cost_pct:+.0f} %",
        f"{row.peak_gib:.2f}",
        "–" if mlx_lm is None or mlx_lm.peak_gib is None else f"{mlx_lm.peak_gib:.2f}",
        *(_ratios(row.beside.get(peer)) for peer in PEERS),
    )
    return f"| {' | '.join(cells)} |\n"


def _ratios(ratios: Ratios | None) -> str:
    return "–" if ratios is None else f"{ratios.prefill:.2f}, {ratios.decode:.2f}"
