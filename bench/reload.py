"""Compare a push of other weights with the start of an engine that has them, by the size of the model.

    python -m bench.reload [--layers 3 20] [--threads 1] [--runs 3]

start     an engine with the weights, from a folder
stage     the weights are read and checked beside those that serve; rows that run wait meanwhile
switch    they serve, between two steps
folder    a push through the API and the worker of a stack, from a folder, until the worker serves them
sent      the same of a safetensors file that is sent: Redis holds it, and the worker writes it to its disk

Models are the demo model and random ones of Qwen3-0.6B's width with so many layers, in bfloat16 on disk and float32 in
memory. Two versions take turns. Ratios are relative to the start of an engine.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from bench import models
from bench.compare import Timing, make_parser, median_ratio, parse_arguments, print_header, time_call
from bench.peers import open_engine
from scorepool import Client
from scorepool.local.demo import free_port
from scorepool.local.stack import PRIVATE, Stack

T = TypeVar("T")
_MIB = 2**20
IN_PROCESS = ("start", "stage", "switch")
SYSTEMS = (*IN_PROCESS, "folder", "sent")
Times = dict[str, list[Timing]]


def main() -> None:
    parser = make_parser(__doc__, runs=3)
    parser.add_argument("--layers", type=int, nargs="*", default=[3, 20], help="of the models beside the demo model")
    arguments = parse_arguments(parser)
    if arguments.quick:
        arguments.layers, arguments.runs = [], 1
    folders = [models.find("demo").folder, *(models.find_layers(number).folder for number in arguments.layers)]
    for folder in folders:
        with tempfile.TemporaryDirectory() as work:
            versions = [folder, change(folder, Path(work) / "changed")]
            times, backend = measure_engine(versions, arguments.runs)
            times |= measure_stack(versions, arguments.runs, Path(work) / "stack")
        num_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
        print_header(f"Reload of {num_bytes / _MIB:.0f} MiB of weights", folder.name, backend)
        print_times(times, num_bytes)


def measure_engine(versions: list[Path], runs: int) -> tuple[Times, str]:
    """Time what an engine does for a version, and its own start."""
    times: Times = {name: [] for name in IN_PROCESS}
    for number in range(runs + 1):
        engine = timed(times["start"], lambda: open_engine(versions[0]))
        staged = timed(times["stage"], lambda: engine.stage_weights(str(versions[1]), 1).result())  # noqa: B023
        served = timed(times["switch"], lambda: engine.switch_weights(restart=False).result().result())  # noqa: B023
        assert served == staged
        backend = engine.model_info.backend
        engine.close()
        if number == 0:  # files that are read for the first time
            for each in times.values():
                each.clear()
    return times, backend


def measure_stack(versions: list[Path], runs: int, state: Path) -> Times:
    """Time pushes through a stack, from folders and as a file."""
    times: Times = {"folder": [], "sent": []}
    environ = {**PRIVATE, "SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_DTYPE": "float32"}
    stack = Stack([f"m={versions[0]}"], state=state, environ=environ, logs=state / "logs")
    with stack, Client(stack.url) as client:
        for number in range(runs):
            folder = versions[(number + 1) % 2]
            for name, source in (("folder", folder), ("sent", (folder / "model.safetensors").read_bytes())):
                pushed = timed(times[name], lambda: client.push_weights("m", source, wait_s=600))  # noqa: B023
                assert pushed.state == "serving", pushed
    return times


def timed(times: list[Timing], work: Callable[[], T]) -> T:
    """Return what `work` does, and note how long it takes."""
    timing, found = time_call(work)
    times.append(timing)
    return found


def change(folder: Path, target: Path) -> Path:
    """Write other weights of the same model."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).symlink_to(file)
    for file in folder.glob("model*.safetensors"):
        stored: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
        changed = {name: weight * 1.01 if weight.ndim > 1 else weight for name, weight in stored.items()}
        mx.save_safetensors(str(target / file.name), changed, {"format": "pt"})
    return target


def print_times(times: Times, num_bytes: int) -> None:
    """Print a line for each system. The CPU time of what other processes do is not known."""
    print(f"{'':10} {'CPU s':>9} {'wall s':>9} {'ratio':>7} {'MiB/s':>9}")
    start = [timing.wall_s for timing in times["start"]]
    for name in SYSTEMS:
        wall = [timing.wall_s for timing in times[name]]
        cpu = f"{statistics.median(timing.cpu_s for timing in times[name]):9.3f}" if name in IN_PROCESS else f"{'':9}"
        median = statistics.median(wall)
        print(
            f"{name:10} {cpu} {median:9.3f} {median_ratio(wall, start):6.2f}x {num_bytes / _MIB / median:9,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
