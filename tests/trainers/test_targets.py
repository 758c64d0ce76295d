"""Logprobs of the caller's ids at each position, for distillation and process rewards: compared with torch."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scorepool import Client, wire

STEP, PLUS, MINUS = 11, 489, 482  # any three ids: a tag that ends a step, and the two verdicts on it


@pytest.fixture(scope="module")
def teacher(root: Path) -> Any:
    folder = root / "scorepool" / "models" / "demo"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def student(root: Path) -> Any:
    """Return the teacher with noise in its weights."""
    model = AutoModelForCausalLM.from_pretrained(root / "scorepool" / "models" / "demo", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    return model


def log_softmax(model: Any, ids: list[int]) -> torch.Tensor:
    """Return [tokens, vocabulary]: row t is the distribution of token t + 1."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)


def draw(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(20, 1000) for _ in range(length)]


@pytest.mark.parametrize("packed", [False, True])
def test_reverse_kl_on_the_students_most_likely_tokens_is_that_of_torch(
    packed: bool, native: Client, teacher: Any, student: Any
):
    prompts, completions = (
        [draw(seed, 5 + seed) for seed in range(12)],
        [draw(99 + seed, 3 * seed + 2) for seed in range(12)],
    )
    asked, expected, shares = [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, first = prompt + completion, len(prompt) - 1
        of_student, of_teacher = (log_softmax(model, ids)[first:-1] for model in (student, teacher))
        top = of_student.topk(16, dim=-1)
        asked.append(wire.ScoreItem(prompt=prompt, completion=completion, targets=top.indices.tolist()))
        shares.append(top.values)
        expected.append((top.values.exp() * (top.values - of_teacher.gather(1, top.indices))).sum(dim=-1))

    result = native.submit(wire.Score(model="demo", items=asked, packed=packed)).result()

    found = result.arrays()["target_logprobs"]
    for row, (values, right) in enumerate(zip(shares, expected, strict=True)):
        of_teacher = torch.from_numpy(np.array(found[row, : len(right)], dtype=np.float64))
        reverse_kl = (values.exp() * (values - of_teacher)).sum(dim=-1)
        assert reverse_kl.numpy() == pytest.approx(right.numpy(), abs=1e-4)


def test_the_verdict_at_each_step_tag_is_that_of_transformers(native: Client, teacher: Any):
    ids = [*draw(1, 9), STEP, *draw(2, 14), STEP, *draw(3, 4), STEP, 20]  # the token after a tag stands for the verdict
    tags = [index for index, token_id in enumerate(ids) if token_id == STEP]
    prompt = ids[:5]
    targets = [[PLUS, MINUS] if index - 1 in tags else [] for index in range(len(prompt), len(ids))]

    item = wire.ScoreItem(prompt=prompt, completion=ids[5:], targets=targets)
    [sequence] = native.submit(wire.Score(model="demo", items=[item])).result().sequences

    logits = log_softmax(teacher, ids)[tags][:, [PLUS, MINUS]]
    expected = torch.softmax(logits, dim=-1)[:, 0].tolist()
    assert sequence.target_logprobs is not None
    pairs = [values.values() for values in sequence.target_logprobs if len(values)]
    found = [float(np.exp(plus) / (np.exp(plus) + np.exp(minus))) for plus, minus in pairs]
    assert found == pytest.approx(expected, abs=1e-4)
    assert pairs == [pytest.approx(pair, abs=1e-4) for pair in logits.tolist()]
