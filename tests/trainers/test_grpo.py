"""TRL's GRPOTrainer generates with a served policy and pushes its weights at each step: the numbers are torch's."""

import os
import runpy
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorepool import ScorepoolError, wire
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from tests.engine.oracle import Oracle
from tests.tiny_models import TinyModels
from tests.worker.conftest import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    from scorepool.integrations import trl
    from scorepool.integrations.trl import weight_sync

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
MODEL = "policy"
URL = f"/v1/models/{MODEL}/weights"
TEXTS = [
    "The quick brown fox jumps over the lazy dog; what does the dog say then?",
    "Say which token is scored under the model, and given which tokens:",
    "def multiply(first: int, second: int, third: int, fourth: int) -> int:",
]
SAMPLES = 8
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def policy(tiny_models: TinyModels) -> Path:
    return tiny_models("llama")


@pytest.fixture(scope="module")
def served(root: Path, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of the policy and, beside it, the demo model, that starts killed processes again."""
    state = tmp_path_factory.mktemp("grpo")
    environ = {
        "SCOREPOOL_PORT": str(free_port()),
        "SCOREPOOL_LEASE_S": "4",
        "SCOREPOOL_LOGPROBS_MODE": "processed_logprobs",
        "OPENBLAS_NUM_THREADS": "1",
    }
    demo = root / "scorepool" / "models" / "demo"
    has_ended = threading.Event()
    with Stack([f"demo={demo}", f"{MODEL}={policy}"], state=state, environ=environ, logs=state / "logs") as stack:

        def watch() -> None:
            while not has_ended.wait(0.3):
                stack.restart_dead()

        thread = threading.Thread(target=watch)
        thread.start()
        yield stack
        has_ended.set()
        thread.join()


class Step(NamedTuple):
    """What one step generated, and the weights that the trainer had at that moment."""

    served: dict[str, Any]  # the state of the served weights
    reply: dict[str, Any]  # of /v1/completions
    weights: dict[str, torch.Tensor]

    @property
    def prompt(self) -> list[int]:
        return self.reply["choices"][0]["prompt_token_ids"]

    @property
    def completions(self) -> list[list[int]]:
        return [choice["token_ids"] for choice in self.reply["choices"]]

    @property
    def logprobs(self) -> list[list[float]]:
        return [choice["logprobs"]["token_logprobs"] for choice in self.reply["choices"]]


class Recorder:
    """Read the replies to TRL's client. Kill the worker after those that `kills` names, by step and route."""

    def __init__(self, trainer: GRPOTrainer, stack: Stack, kills: set[tuple[int, str]]) -> None:
        self.steps: list[Step] = []
        self.killed: list[int] = []
        self._trainer, self._stack, self._kills = trainer, stack, kills
        trainer.vllm_generation.vllm_client.session.hooks["response"] = [self._read]

    def _read(self, reply: Any, *_: Any, **__: Any) -> None:
        route = reply.url.removeprefix(self._stack.url)
        if route == "/v1/completions":
            state = httpx.get(self._stack.url + URL).json()
            weights = {name: tensor.clone() for name, tensor in self._trainer.model.state_dict().items()}
            self.steps.append(Step(state, reply.json(), weights))
        if (self._trainer.state.global_step, route) in self._kills:
            self.killed.append(self._stack.pid(f"worker {MODEL}"))
            os.kill(self.killed[-1], signal.SIGKILL)


class TorchPolicy:
    """Stand for TRL's client in a second run: the same tokens, with the logprobs that the trained model gives them."""

    def __init__(self, trainer: GRPOTrainer, steps: list[Step]) -> None:
        self._trainer, self._steps = trainer, iter(steps)

    def update_named_params(self, *_: Any) -> None:
        """The trained model is at hand."""

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def generate(self, prompts: list[list[int]], n: int, **_: Any) -> dict[str, Any]:
        step = next(self._steps)
        assert (prompts, n) == ([step.prompt], SAMPLES)
        logprobs = rows_of(Oracle(self._trainer.model), step)
        columns = [[[float(value)] for value in row] for row in logprobs]
        return {"prompt_ids": prompts, "completion_ids": step.completions, "logprobs": columns}


def rows_of(oracle: Oracle, step: Step) -> list[np.ndarray]:
    """Return torch's logprobs of the generated tokens, at the temperature that they were sampled with."""
    rows = []
    for completion in step.completions:
        table = oracle.logprobs([*step.prompt, *completion], TEMPERATURE)[len(step.prompt) - 1 : -1]
        rows.append(table[range(len(completion)), completion])
    return rows


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(text.count("e") + text.count(" ")) for text in completions]


def make_trainer(policy: Path, stack: Stack, output: Path, num_steps: int) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(output),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=stack.url,
        num_generations=SAMPLES,
        per_device_train_batch_size=SAMPLES,
        gradient_accumulation_steps=1,
        max_completion_length=12,
        temperature=TEMPERATURE,
        beta=0.1,
        learning_rate=2e-3,
        max_steps=num_steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=3,
        disable_tqdm=True,
    )
    with weight_sync(MODEL):
        return GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": TEXTS * 10}),
            processing_class=AutoTokenizer.from_pretrained(policy),
        )


def column(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if "loss" in entry]


def counted(stack: Stack) -> dict[str, int]:
    """Return the given tokens of all sequences, by whether a shared prefix had them or they were computed."""
    names = {f'scorepool_prefix_tokens_total{{from="{source}"}}': source for source in ("cache", "computed")}
    lines = [line.rpartition(" ") for line in httpx.get(f"{stack.url}/metrics").text.splitlines()]
    return {names[name]: int(float(value)) for name, _, value in lines if name in names}


def test_the_samples_of_a_prompt_compute_it_once(policy: Path, served: Stack, tmp_path: Path):
    before = counted(served)
    trainer = make_trainer(policy, served, tmp_path, 3)
    recorder = Recorder(trainer, served, set())
    trainer.train()

    total = sum(len(step.prompt) for step in recorder.steps)
    expected = {"computed": before["computed"] + total, "cache": before["cache"] + SAMPLES * total}
    until(lambda: counted(served) == expected)  # workers report what they counted with their heartbeats


@pytest.mark.parametrize("num_steps", [10, pytest.param(30, marks=pytest.mark.soak)])
@pytest.mark.soak
def test_each_step_generates_with_its_own_weights_though_the_worker_is_killed(
    policy: Path, served: Stack, tmp_path: Path, num_steps: int
):
    before = httpx.get(served.url + URL).json()["version"]
    trainer = make_trainer(policy, served, tmp_path, num_steps)
    # Once between a push and the generation with it, once between a generation and the next push.
    kills = {(num_steps // 3, "/reset_prefix_cache"), (2 * num_steps // 3, "/v1/completions")}
    recorder = Recorder(trainer, served, kills)
    trainer.train()

    steps = recorder.steps
    assert len(set(recorder.killed)) == 2
    assert [step.served["version"] for step in steps] == [before + 1 + index for index in range(num_steps)]
    assert len({step.reply["system_fingerprint"] for step in steps}) == num_steps
    oracles = []
    for step in steps:
        model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
        model.load_state_dict(step.weights)
        oracles.append(Oracle(model))
        for row, expected in zip(step.logprobs, rows_of(oracles[-1], step), strict=True):
            assert row == pytest.approx(expected, abs=1e-4)
    for (stale, _), (_, step) in pairwise(zip(oracles, steps, strict=True)):  # these weights would have been noticed
        differences = np.subtract(np.concatenate(step.logprobs), np.concatenate(rows_of(stale, step)))
        assert np.abs(differences).max() > 1e-3

    for bound in ("min", "max"):
        ratios = column(trainer, f"sampling/importance_sampling_ratio/{bound}")
        assert ratios == pytest.approx([1] * num_steps, abs=1e-3)
    local = make_trainer(policy, served, tmp_path, num_steps)
    local.vllm_generation.vllm_client = TorchPolicy(local, steps)
    local.train()
    assert len(set(column(trainer, "loss"))) == num_steps
    assert column(trainer, "loss") == pytest.approx(column(local, "loss"), abs=1e-3)
    assert column(trainer, "grad_norm") == pytest.approx(column(local, "grad_norm"), rel=1e-3)


def test_the_example(root: Path, served: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["grpo_trl.py", served.url])
    runpy.run_path(str(root / "examples" / "grpo_trl.py"), run_name="__main__")
    version, *steps = capsys.readouterr().out.splitlines()[-4:]
    assert version == "version of the weights: 3"
    assert [line.split()[1] for line in steps] == ["1", "2", "3"]
    assert all(line.endswith("importance ratio 1.000") for line in steps)


def test_what_cannot_be_pushed_is_refused_by_name_and_what_served_serves_on(served: Stack):
    before = httpx.get(served.url + URL).json()
    with weight_sync(MODEL):
        client = vllm_generation.VLLMClient(base_url=served.url)
    with pytest.raises(ScorepoolError, match=r"the weights lack model\.embed_tokens\.weight"):
        client.update_named_params(None, iter([("model.other.weight", torch.ones(2))]))
    after = httpx.get(served.url + URL).json()
    assert (after["version"], after["state"]) == (before["version"], "serving")

    with weight_sync("none"):
        client = vllm_generation.VLLMClient(base_url=served.url)
    with pytest.raises(ScorepoolError, match="no live worker serves 'none'"):
        client.init_communicator()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_push_whose_reply_is_lost_is_repeated_only_if_it_was_not_taken(is_taken: bool):
    def state(version: int) -> wire.WeightsState:
        return wire.WeightsState(model=MODEL, version=version, state="serving")

    def push() -> wire.WeightsState:
        pushes.append(is_taken or len(pushes) == 1)
        if len(pushes) == 1:
            error = ScorepoolError(
                503, wire.ErrorBody(code="unavailable", message="Redis is silent", type=""), "POST /weights"
            )
            error.may_be_done = True
            raise error
        return state(3 + sum(pushes))

    pushes: list[bool] = []  # True: it was taken
    found = trl._pushed(push, lambda: state(3 + sum(pushes)), 3, time.monotonic() + 60)

    assert found.version == 4
    assert pushes == ([True] if is_taken else [False, True])


def test_a_push_that_is_refused_is_not_repeated():
    def push() -> wire.WeightsState:
        raise ScorepoolError(400, wire.ErrorBody(code="invalid", message="no such tensor", type=""), "POST /weights")

    def read() -> wire.WeightsState:
        raise AssertionError("nothing is to be looked for")

    with pytest.raises(ScorepoolError, match="no such tensor"):
        trl._pushed(push, read, 3, time.monotonic() + 60)
