"""A row's numbers are its own: the same alone and in any company, in any chunking, with or without a shared prefix.

With a fast BLAS, whose kernels follow the shape of a batch, "the same" is within TOLERANCE; with the BLAS that MLX's
wheel brings along, and in exact mode with any, to the bit.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scorepool.engine import Engine, Sampling, Sequence
from scorepool.engine.model import blas
from tests.tiny_models import BOS, VOCAB_SIZE

pytestmark = pytest.mark.timeout(300)  # hundreds of cases a test
EXAMPLES = int(os.environ.get("INVARIANCE_EXAMPLES", "500"))
TOLERANCE = 5e-5 if blas._NAMES else 0.0
# Attention, experts; a state; a window that slides, whose buffers differ in size, and so sums in their order.
MODELS = ["llama", "qwen3_moe"] + (["granitehybrid", "gemma3"] if blas._NAMES else [])
EXACT = ["llama", "qwen3_moe", "granitehybrid", "gemma3", "gpt_oss"]
BUDGETS = [(25, 2), (64, 32), (1000, 4), (8192, 32)]  # max_batch_tokens, max_running_rows
_draw = Random(2)
DOCUMENTS = [[BOS] + [_draw.randrange(3, VOCAB_SIZE) for _ in range(109)] for _ in range(2)]


@dataclass(frozen=True)
class Asked:
    """A row that can be made again."""

    token_ids: tuple[int, ...]
    score_from: int | None
    top_logprobs: int
    sampling: Sampling | None

    def sequence(self) -> Sequence:
        return Sequence(
            token_ids=list(self.token_ids),
            score_from=self.score_from,
            top_logprobs=self.top_logprobs,
            sampling=self.sampling,
        )


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Beginnings of few documents, so that rows share prefixes of any length, and a suffix of their own."""
    begin = draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(1, 24) | st.integers(90, 110))]
    suffix = draw(st.lists(st.integers(3, VOCAB_SIZE - 1), max_size=5))
    tokens = (*begin, *suffix)
    generates = draw(st.booleans())
    sampling = Sampling(max_tokens=draw(st.integers(1, 4)), seed=draw(st.integers(0, 9))) if generates else None
    first = st.integers(0, len(tokens))
    return Asked(tokens, draw(st.none() | first if generates else first), draw(st.sampled_from([0, 3])), sampling)


companies = {
    "rows": st.lists(asked(), min_size=2, max_size=4),
    "budget": st.sampled_from(BUDGETS),
    "is_one_group": st.booleans(),
}


@pytest.fixture(scope="module")
def alone(engine_of: Callable[..., Engine]) -> Callable[..., Sequence]:
    """A row by itself, whole, run once a session."""
    found: dict[tuple[str, Asked, str], Sequence] = {}

    def run(name: str, row: Asked, mode: str) -> Sequence:
        if (name, row, mode) not in found:
            found[name, row, mode] = row.sequence()
            engine_of(name, mode=mode, prefix_cache_bytes=0).add([found[name, row, mode]]).result(60)
        return found[name, row, mode]

    return run


def run_together(engine: Engine, rows: list[Asked], is_one_group: bool) -> list[Sequence]:
    sequences = [row.sequence() for row in rows]
    groups = [sequences] if is_one_group else [[sequence] for sequence in sequences]
    for future in [engine.add(group) for group in groups]:
        future.result(60)
    return sequences


def assert_same(found: Sequence, expected: Sequence, tolerance: float) -> None:
    """Where logits move, a token that was nearly tied may be sampled instead: entries behind it are of another text."""
    if tolerance == 0:
        assert found.token_ids == expected.token_ids
        assert (found.columns.logprobs, found.columns.top_ids) == (expected.columns.logprobs, expected.columns.top_ids)
        assert found.columns.top_logprobs == expected.columns.top_logprobs
        return
    num_input_tokens = found.num_input_tokens
    new = zip(found.token_ids[num_input_tokens:], expected.token_ids[num_input_tokens:], strict=False)
    num_same = next(
        (place for place, (one, other) in enumerate(new) if one != other), len(found.token_ids) - num_input_tokens
    )
    num_entries = len(found.columns.logprobs) - found.num_generated + num_same
    for one, other in (
        (found.columns.logprobs, expected.columns.logprobs),
        (found.columns.top_logprobs, expected.columns.top_logprobs),
    ):
        np.testing.assert_allclose(flat(one[:num_entries]), flat(other[:num_entries]), rtol=0, atol=tolerance)


def flat(column: list[float | None] | list[list[float]]) -> list[float]:
    """None, of a first token, as NaN, which equals NaN here."""
    return [np.nan if value is None else value for row in column for value in (row if isinstance(row, list) else [row])]


def assert_rescored_the_same(engine: Engine, row: Sequence, tolerance: float) -> None:
    again = Sequence(token_ids=list(row.token_ids), score_from=row.num_input_tokens)
    engine.add([again]).result(60)
    generated = row.columns.logprobs[len(row.columns.logprobs) - row.num_generated :]
    np.testing.assert_allclose(generated, again.columns.logprobs, rtol=0, atol=tolerance)


def assert_invariant(
    engine_of: Callable[..., Engine],
    alone: Callable[..., Sequence],
    name: str,
    rows: list[Asked],
    budget: tuple[int, int],
    is_one_group: bool,
    mode: str = "default",
) -> None:
    tolerance = TOLERANCE if mode == "default" else 0.0
    engine = engine_of(name, mode=mode, max_batch_tokens=budget[0], max_running_rows=budget[1])
    for row, found in zip(rows, run_together(engine, rows, is_one_group), strict=True):
        assert_same(found, alone(name, row, mode), tolerance)
        if found.sampling:
            assert_rescored_the_same(engine, found, 5e-5 if mode == "default" else 0.0)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(MODELS), **companies)
def test_a_row_is_the_same_in_any_company(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **company: object
):
    assert_invariant(engine_of, alone, **company)


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(name=st.sampled_from(MODELS), mode=st.sampled_from(["default", "exact"]), **companies)
def test_a_row_is_the_same_in_ten_thousand_companies(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **company: object
):
    assert_invariant(engine_of, alone, **company)


@settings(
    max_examples=max(1, EXAMPLES // 5),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(name=st.sampled_from(EXACT), **companies)
def test_in_exact_mode_a_row_is_the_same_to_the_bit(
    engine_of: Callable[..., Engine], alone: Callable[..., Sequence], **company: object
):
    assert_invariant(engine_of, alone, mode="exact", **company)


def test_with_the_wheels_own_blas_a_row_is_the_same_to_the_bit(root: Path):
    """In a process of its own, in which no other BLAS is found."""
    own = "tests/engine/test_invariance.py::test_a_row_is_the_same_in_any_company"
    code = (
        "from scorepool.engine.model import blas; blas._NAMES = (); import pytest;"
        f"raise SystemExit(pytest.main([{own!r}, '-q']))"
    )

    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | {"INVARIANCE_EXAMPLES": str(max(1, EXAMPLES // 5))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stdout[-3000:]


def test_a_suffix_changes_nothing_before_it(engine_of: Callable[..., Engine]):
    engine = engine_of("llama")
    rows = [Sequence(token_ids=[*DOCUMENTS[0], *suffix], score_from=1) for suffix in ([], [5], [7, 8, 9] * 20)]

    engine.add(rows).result(60)

    for row in rows[1:]:
        np.testing.assert_allclose(row.columns.logprobs[:109], rows[0].columns.logprobs, rtol=0, atol=TOLERANCE)
