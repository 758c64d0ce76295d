"""TRL's own trainers distil from a served teacher, and lose what they lose with a teacher of torch in their process."""

import asyncio
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from scorepool.local.demo import free_port
from scorepool.local.stack import Stack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its imports
    from trl.experimental.async_distillation.async_rollout_worker import _AsyncRolloutLoop
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer
    from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer
    from trl.generation import vllm_client

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
STEPS = 30
TEXTS = ["If the file does not exist,", "def main(", "The name of", "import os\n", "Return the number of", "A list"]


@pytest.fixture(scope="module")
def demo(root: Path) -> Path:
    return root / "scorepool" / "models" / "demo"


@pytest.fixture(scope="module")
def served(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A teacher whose logprobs are those at the temperature of the request, as TRL expects of its server."""
    state = tmp_path_factory.mktemp("teacher")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_LOGPROBS_MODE": "processed_logprobs"}
    with Stack([f"demo={demo}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


@pytest.fixture(scope="module")
def teacher(demo: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client requires vLLM to be installed and uses nothing of it here."""
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda *_, **__: True)


class LocalTeacher:
    """Answer like TRL's client, with torch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float, **_: Any
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {
            name: [] for name in ("logprobs", "logprob_token_ids", "actual_logprobs", "actual_token_ids")
        }
        for ids, length in zip(sequences, prompt_lengths, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, length - 1 : -1].float()
            logprobs = torch.log_softmax(logits / temperature, dim=-1)
            actual = torch.tensor(ids[length:])[:, None]
            top = logprobs.topk(top_logprobs)
            answer["logprobs"].append(top.values.tolist())
            answer["logprob_token_ids"].append(top.indices.tolist())
            answer["actual_logprobs"].append(logprobs.gather(1, actual).tolist())
            answer["actual_token_ids"].append(actual.tolist())
        return answer


class KillWorker(TrainerCallback):
    """Kill the teacher's worker after a step, and start another."""

    def __init__(self, stack: Stack, step: int) -> None:
        self._stack, self._step = stack, step
        self._ended = threading.Event()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(self._stack.pid("worker demo"), signal.SIGKILL)
            threading.Thread(target=self._revive).start()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._ended.set()

    def _revive(self) -> None:
        while not self._ended.wait(0.5):
            self._stack.restart_dead()


def losses(make: Any, demo: Path, local: LocalTeacher | None, callbacks: list[TrainerCallback]) -> list[float]:
    """Train a student from the same start. Return the loss of each step."""
    torch.manual_seed(5)
    config = AutoConfig.from_pretrained(demo, num_hidden_layers=1)
    student = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    trainer = make(student, AutoTokenizer.from_pretrained(demo), callbacks)
    if local is not None:
        trainer.teacher_client = local
    trainer.train()
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(found) == STEPS
    return found


def arguments(path: Path, url: str) -> dict[str, Any]:
    return {
        "output_dir": str(path),
        "teacher_model_server_url": url,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "max_completion_length": 8,
        "disable_tqdm": True,
    }


@pytest.mark.parametrize(("beta", "top"), [pytest.param(0.0, 16, marks=pytest.mark.soak), (0.5, 1)])
def test_server_distillation_loses_what_a_local_teacher_costs(
    served: Stack, demo: Path, teacher: Any, tmp_path: Path, beta: float, top: int
):
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in TEXTS * 20]})

    def make(student: Any, tokenizer: Any, callbacks: list[TrainerCallback]) -> Any:
        asked = {"beta": beta, "loss_top_k": top, "temperature": 0.7}
        config = ServerDistillationConfig(**arguments(tmp_path, served.url), **asked)
        return ServerDistillationTrainer(
            student, args=config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks
        )

    found = losses(make, demo, None, [KillWorker(served, STEPS // 2)] if beta == 0 else [])
    expected = losses(make, demo, LocalTeacher(teacher), [])

    assert found == pytest.approx(expected, abs=1e-3)
    assert len(set(found)) > STEPS // 2


@pytest.mark.soak
def test_iw_opd_loses_what_a_local_teacher_costs(served: Stack, demo: Path, teacher: Any, tmp_path: Path):
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "no"}] for text in TEXTS * 20]
    data = Dataset.from_dict({"messages": chats})

    def make(student: Any, tokenizer: Any, callbacks: list[TrainerCallback]) -> Any:
        config = IWOPDConfig(**arguments(tmp_path, served.url), use_teacher_server=True)
        return IWOPDTrainer(student, args=config, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)

    found = losses(make, demo, None, [])
    expected = losses(make, demo, LocalTeacher(teacher), [])

    assert found == pytest.approx(expected, abs=1e-3)
    assert len(set(found)) > STEPS // 2


def test_async_distillation_scores_with_the_teachers_temperature(served: Stack, teacher: Any):
    loop: Any = object.__new__(_AsyncRolloutLoop)
    loop.teacher_temperature, loop.teacher_top_k, loop.request_timeout = 0.7, 256, 60.0
    prompt, completion = [5, 6, 7, 300, 41], [274, 312, 9, 45]

    async def score() -> Any:
        async with aiohttp.ClientSession() as loop.session:
            return await loop._score_with_teacher(prompt, completion, served.url, "demo")

    ids, logprobs = asyncio.run(score())

    expected = LocalTeacher(teacher).get_sequence_logprobs([prompt + completion], [len(prompt)], 256, 0.7)
    for row, (row_ids, values) in enumerate(zip(ids, logprobs, strict=True)):
        assert len(values) in (256, 257)
        assert values[:256] == pytest.approx(expected["logprobs"][0][row], abs=1e-4)
        assert completion[row] in row_ids
