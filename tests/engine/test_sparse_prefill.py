"""A part of a prompt, at its own positions: compared with transformers on the same tokens and position_ids."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from scorepool.engine import DraftContextExceeded, Engine, InvalidRequest, Sampling, Sequence
from scorepool.engine.core import EngineCore
from scorepool.engine.model.backbone import split_model
from scorepool.engine.model.load import load_checked
from scorepool.engine.model.prompt_scorer import WINDOW, PromptScorer
from tests.engine.between_steps import add, cancel, drive
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_late_constraints import LateConstraint
from tests.tiny_tokenizer import BOS

FAMILIES = ["llama", "qwen3", "qwen3_moe", "gpt_neox", "llama3"]


def prompt(length: int = 300, seed: int = 0) -> list[int]:
    draw = Random(seed)
    return [BOS, *(draw.randrange(20, 300) for _ in range(length - 1))]


def sequence(keep_pct: float | None = 20.0, seed: int = 0, length: int = 300, max_tokens: int = 12) -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Sequence(token_ids=prompt(length, seed), sampling=sampling, keep_pct=keep_pct, top_logprobs=3)


def run(engine: Engine, sequences: list[Sequence]) -> None:
    futures: list[Future[list[Sequence]]] = [engine.add([one]) for one in sequences]
    for future in futures:
        future.result(120)


def assert_equals_kept_tokens(one: Sequence, oracle: Oracle) -> None:
    """Compare with transformers, which is given the kept and the generated tokens, and their positions."""
    assert one.kept is not None
    generated = range(one.num_input_tokens, len(one.token_ids))
    positions = [*one.kept, *generated]
    logprobs = oracle.logprobs([one.token_ids[position] for position in positions], position_ids=positions)
    assert len(one.columns.logprobs) == len(generated)
    for entry, position in enumerate(generated):
        row = logprobs[len(one.kept) - 1 + entry]
        assert abs(one.columns.logprobs[entry] - row[one.token_ids[position]]) < 1e-4
        assert one.columns.top_logprobs[entry] == pytest.approx(sorted(row)[::-1][:3], abs=1e-4)


@pytest.fixture(scope="module")
def sparse_engine(engine_of: Callable[..., Engine], folder_of: Callable[[str], Path]) -> Callable[[str], Engine]:
    draft = str(folder_of("llama"))
    return lambda name: engine_of(name, speculation="draft", draft=draft)


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_transformers_on_the_kept_tokens_at_their_positions(
    name: str, sparse_engine: Callable[[str], Engine], oracle_of: Callable[[str], Oracle]
):
    one = sequence()
    run(sparse_engine(name), [one])
    assert one.kept is not None
    assert 60 <= len(one.kept) <= 60 + 32
    assert one.kept[:32] == [*range(32)]
    assert one.kept[-32:] == [*range(268, 300)]
    assert_equals_kept_tokens(one, oracle_of(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_of_a_prompt_gives_what_a_plain_run_gives(name: str, sparse_engine: Callable[[str], Engine]):
    whole, plain = sequence(100), sequence(None)
    run(sparse_engine(name), [whole, plain])
    assert whole.kept == [*range(300)]
    assert whole.token_ids == plain.token_ids
    assert whole.columns.logprobs == pytest.approx(plain.columns.logprobs, abs=1e-4)


def test_rows_with_gaps_run_beside_others_in_one_batch_and_in_chunks(
    engine_of: Callable[..., Engine], folder_of: Callable[[str], Path], oracle_of: Callable[[str], Oracle]
):
    engine = engine_of("qwen3", speculation="draft", draft=str(folder_of("qwen3")), max_batch_tokens=48)
    sparse = [sequence(30, seed=1, max_tokens=30), sequence(50, seed=2, length=400, max_tokens=5)]
    # The plain row has as many slots as its position says, and the row with gaps has fewer: that row stays masked.
    plain = sequence(None, seed=3, length=300, max_tokens=20)
    scored = Sequence(token_ids=prompt(40, 4), score_from=1)
    run(engine, [sparse[0], plain, scored, sparse[1]])
    oracle = oracle_of("qwen3")
    for one in sparse:
        assert_equals_kept_tokens(one, oracle)
    assert_agrees(plain, oracle)
    assert_agrees(scored, oracle)
    assert all(not one.num_proposed and not one.num_cached for one in sparse)


def test_a_prompt_is_computed_anew_and_never_kept_for_others(
    sparse_engine: Callable[[str], Engine], oracle_of: Callable[[str], Oracle]
):
    for one in (sequence(30, seed=5), sequence(30, seed=5), sequence(None, seed=5), sequence(None, seed=5)):
        run(sparse_engine("llama"), [one])
        if one.keep_pct is None:
            assert one.kept is None
            assert_agrees(one, oracle_of("llama"))
        else:
            assert not one.num_cached
            assert_equals_kept_tokens(one, oracle_of("llama"))


def test_a_short_prompt_is_computed_whole(sparse_engine: Callable[[str], Engine], oracle_of: Callable[[str], Oracle]):
    one = sequence(20, length=255)
    run(sparse_engine("llama"), [one])
    assert one.kept is None
    assert_agrees(one, oracle_of("llama"))


def test_a_row_with_gaps_can_be_paused(sparse_engine: Callable[[str], Engine], oracle_of: Callable[[str], Oracle]):
    one, other = sequence(30, seed=6, max_tokens=8), sequence(30, seed=7, max_tokens=8)
    one.constraint = LateConstraint(0, 4)
    run(sparse_engine("llama"), [one, other])
    assert one.num_pauses > 0
    assert_equals_kept_tokens(one, oracle_of("llama"))
    assert_equals_kept_tokens(other, oracle_of("llama"))


def test_a_row_has_begun_when_the_draft_model_reads_its_prompt(sparse_engine: Callable[[str], Engine]):
    def read(core: EngineCore) -> list[list[bool]]:
        rows = [sequence(30, seed=seed, length=500) for seed in (11, 12, 11)]
        groups = [add(core, row) for row in rows]
        seen = [[group.has_begun for group in groups]]
        core.step()  # the first of two chunks
        seen.append([group.has_begun for group in groups])
        assert not any(row.kept or row.num_computed for row in rows)
        cancel(core, *groups)
        return seen

    assert drive(sparse_engine("llama"), read) == [[False] * 3, [True, False, True]]


def test_prompts_go_on_beside_decoding_rows_while_the_draft_model_reads_others(
    engine_of: Callable[..., Engine], folder_of: Callable[[str], Path]
):
    def compute_beside(core: EngineCore) -> int:
        row = Sequence(token_ids=prompt(5), sampling=Sampling(max_tokens=500, ignore_eos=True), speculation="off")
        groups = [add(core, row)]
        core.step()
        while core.scheduler.pace.max_tokens:  # until some steps are to decode only, so that their cost is known
            assert row.num_generated < 400
            groups.append(add(core, Sequence(token_ids=prompt(256, seed=len(groups)), score_from=250)))
            core.step()
        groups.append(add(core, *(sequence(30, seed=seed, length=500) for seed in range(1000, 1020))))
        before = core.stats.prompt_tokens
        for _ in range(30):
            core.step()
        assert not row.is_done
        cancel(core, *groups)
        return core.stats.prompt_tokens - before

    draft = str(folder_of("llama"))
    engine = engine_of("llama", speculation="draft", draft=draft, max_batch_tokens=256, prefill_ms=1)
    assert drive(engine, compute_beside) > 20 * 32


def test_rows_that_are_canceled_while_their_prompt_is_read_leave_nothing(sparse_engine: Callable[[str], Engine]):
    engine = sparse_engine("llama")
    canceled = [engine.add([sequence(30, seed=8, length=500)]) for _ in range(3)]
    last = sequence(30, seed=9)
    future = engine.add([last])
    for each in canceled:
        each.cancel()
    future.result(60)
    assert last.kept is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep_pct": 0.5}, "has keep_pct 0.5; expected 1 to 100"),
        ({"score_from": 0}, "the tokens of its prompt are scored"),
        ({"sampling": None, "score_from": 1}, "the tokens of its prompt are scored"),
        ({"speculation": "ngram"}, "has keep_pct beside speculation 'ngram'"),
    ],
)
def test_what_does_not_go_with_a_part_of_a_prompt_is_refused(
    change: dict[str, object], message: str, sparse_engine: Callable[[str], Engine]
):
    one = sequence()
    for name, value in change.items():
        setattr(one, name, value)
    with pytest.raises(InvalidRequest, match=message):
        sparse_engine("llama").add([one])


def test_a_prompt_longer_than_the_context_of_the_draft_model_is_refused(
    engine_of: Callable[..., Engine], folder_of: Callable[[str], Path], tmp_path: Path
):
    draft = tmp_path / "draft"
    shutil.copytree(folder_of("llama"), draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 310}))
    engine = engine_of("llama", speculation="draft", draft=str(draft))
    run(engine, [sequence(length=310), sequence(None, length=311)])
    with pytest.raises(DraftContextExceeded, match=r"has 311 tokens; the context of the draft model, .* is 310 tokens"):
        engine.add([sequence(length=311)])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma3", "a state or a sliding window, which cannot skip tokens"),
        ("mamba2", "a state or a sliding window, which cannot skip tokens"),
        ("gpt2", "positions cannot have gaps|no rotary positions"),
    ],
)
def test_models_that_cannot_skip_tokens_refuse_by_name(name: str, reason: str, sparse_engine: Callable[[str], Engine]):
    engine = sparse_engine(name)
    with pytest.raises(InvalidRequest, match=reason):
        engine.add([Sequence(token_ids=[BOS, 5], sampling=Sampling(max_tokens=1), keep_pct=20)])


def test_a_model_whose_window_is_no_caches_refuses_by_name(
    edited: Callable[..., Path], folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    engine = open_engine(edited("gemma2", sliding_window=16), speculation="draft", draft=str(folder_of("llama")))
    with pytest.raises(InvalidRequest, match="a sliding window, which cannot skip tokens"):
        engine.add([sequence()])


def test_exact_mode_and_an_engine_without_a_draft_refuse_by_name(
    engine_of: Callable[..., Engine], folder_of: Callable[[str], Path]
):
    exact = engine_of("llama", speculation="draft", draft=str(folder_of("llama")), mode="exact")
    with pytest.raises(InvalidRequest, match="exact mode computes every token"):
        exact.add([sequence()])
    with pytest.raises(InvalidRequest, match="served without a draft model"):
        engine_of("llama").add([sequence()])


def test_the_tokens_that_the_last_ones_attend_to_are_kept(folder_of: Callable[[str], Path]):
    """The scores are the attention that transformers reports for the draft model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder_of("llama"), attn_implementation="eager").eval()
    token_ids = prompt(300)
    with torch.no_grad():
        attentions = model(torch.tensor([token_ids]), output_attentions=True).attentions
    expected = torch.stack([layer[0, :, -WINDOW:].mean(dim=1).amax(dim=0) for layer in attentions]).amax(dim=0)

    loaded, _, _ = load_checked(folder_of("llama"), "float32")
    scorer = PromptScorer(loaded, split_model(loaded), 512)
    run_ = scorer.begin(token_ids)
    assert scorer.fault is None
    assert scorer.advance(run_) is None
    assert scorer.advance(run_) == pytest.approx(expected.tolist(), abs=1e-5)
