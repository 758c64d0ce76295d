"""The head of a checkpoint for multi-token prediction changes nothing but the time, and its logprobs are its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scorepool.engine import Engine, EngineSettings, InvalidRequest, LoadError, Sampling, Sequence
from scorepool.engine.model.mtp import MAX_MISSING, PredictionHead
from scorepool.engine.sampling.query import LogprobQuery
from scorepool.engine.scheduling.slice import Slice
from tests.engine import mtp_checkpoints
from tests.engine.adapters import oracle_with, save_adapter
from tests.engine.mtp_checkpoints import SHAPES, TorchHead
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_speculation import rows
from tests.tiny_tokenizer import BOS

Opened = tuple[Engine, TorchHead]
WIDTH = 256
SMALL = 2**20  # bytes


@pytest.fixture(autouse=True)
def three_proposals(always_propose: Callable[[Callable[[int], int]], None]):
    """Verify three tokens wherever there is room."""
    always_propose(lambda max_width: min(3, max_width))


@pytest.mark.parametrize("kind", SHAPES)
def test_tokens_are_the_models_and_the_heads_logprobs_those_of_torch(
    kind: str, open_engine: Callable[..., Engine], tmp_path: Path
):
    head = mtp_checkpoints.build(kind, tmp_path, has_copies=kind == "deepseek_v3")
    oracle = Oracle(mtp_checkpoints.oracle_model(kind))
    plain, engine = open_engine(tmp_path), open_engine(tmp_path, speculation="mtp")
    expected, found = rows(), rows()
    for sequence in found:
        sequence.reports_proposals = sequence.sampling is not None

    for opened, sequences in ((plain, expected), (engine, found)):
        for future in [opened.add([sequence]) for sequence in sequences]:
            future.result(120)

    assert (engine.model_info.speculation, engine.model_info.speculations) == ("mtp", ("off", "ngram", "mtp"))
    for one, other in zip(expected, found, strict=True):
        assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
        assert_agrees(other, oracle)
        assert len(other.proposals) == other.num_proposed
    assert_proposals_agree(found[0], head)  # a greedy row
    assert engine.stats.proposed_tokens > 30


def assert_proposals_agree(sequence: Sequence, head: TorchHead, first: int = 0) -> None:
    """Compare the logprob of each proposed token with the head on torch, which has seen the row since `first`.

    A proposed token follows the row's own tokens, or those that were proposed before it in the same step.
    """
    step: list[int] = []
    num_following = 0
    last = -1
    for proposed in sequence.proposals:
        start = sequence.num_input_tokens + proposed.position
        begins = head.logprobs(sequence.token_ids[:start], first, [proposed.token_id])[-1]
        is_begin = abs(proposed.draft_logprob - begins[proposed.token_id].item()) < 1e-4
        if not is_begin:
            assert proposed.position == last + 1
            known = sequence.token_ids[: start - len(step)]
            follows = head.logprobs(known, first, [*step, proposed.token_id])[-1]
            assert proposed.draft_logprob == pytest.approx(follows[proposed.token_id].item(), abs=1e-4)
            assert proposed.token_id == follows.argmax().item()
            num_following += 1
        step, last = [proposed.token_id] if is_begin else [*step, proposed.token_id], proposed.position
    assert num_following > 1


@pytest.mark.parametrize("kind", SHAPES)
def test_the_proposals_of_a_head_that_agrees_are_accepted_sampled_ones_too(
    kind: str, open_engine: Callable[..., Engine], tmp_path: Path
):
    mtp_checkpoints.build(kind, tmp_path, agrees=True)
    engine = open_engine(tmp_path, speculation="mtp")
    sampled = [
        Sequence(token_ids=[BOS, 7, 8, seed], sampling=Sampling(max_tokens=40, seed=seed, top_k=9, ignore_eos=True))
        for seed in range(4)
    ]
    engine.add(sampled).result(120)
    stats = engine.stats
    assert stats.proposed_tokens > 60
    assert stats.accepted_tokens >= stats.proposed_tokens - 2  # rounding may decide between two equal tokens
    assert stats.steps < 30


def test_exact_mode_has_the_same_bits_with_a_head(open_engine: Callable[..., Engine], tmp_path: Path):
    mtp_checkpoints.build("glm4_moe", tmp_path, agrees=True)
    found: list[list[Sequence]] = []
    for speculation in ("off", "mtp"):
        found.append([rows(40)[index] for index in (0, 5, -1)])
        open_engine(tmp_path, mode="exact", speculation=speculation).add(found[-1]).result(120)
    for one, other in zip(*found, strict=True):
        assert (other.token_ids, other.columns) == (one.token_ids, one.columns)
    assert sum(sequence.num_accepted for sequence in found[1]) > 5


def test_rows_that_pause_proposing_leave_and_are_canceled(open_engine: Callable[..., Engine], tmp_path: Path):
    head = mtp_checkpoints.build("glm4_moe", tmp_path)
    oracle = Oracle(mtp_checkpoints.oracle_model("glm4_moe"))
    engine = open_engine(tmp_path, speculation="mtp", max_batch_tokens=64)  # the long prompt comes in chunks
    options = {"ignore_eos": True, "temperature": 0}
    long = Sequence(token_ids=[BOS, *[11, 12, 13] * 60], sampling=Sampling(max_tokens=90, **options))
    long.reports_proposals = True
    short = [Sequence(token_ids=[BOS, seed], sampling=Sampling(max_tokens=5 * seed, **options)) for seed in range(3, 7)]
    others = [Sequence(token_ids=[BOS, 9], sampling=Sampling(max_tokens=20, **options)) for _ in range(2)]
    others[0].speculation, others[1].speculation = "off", "ngram"
    canceled = Sequence(token_ids=[BOS, 5], sampling=Sampling(max_tokens=90, **options))
    leaves = engine.add([canceled], on_step=lambda _: engine.cancel(leaves) if canceled.num_generated > 4 else None)
    for future in [engine.add([sequence]) for sequence in [long, *short, *others]]:
        future.result(120)
    for sequence in [long, *short, *others]:
        assert_agrees(sequence, oracle)
    assert others[0].num_proposed == 0
    assert long.num_proposed > 10
    assert_proposals_agree(long, head)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("llama", "'llama' has no head for multi-token prediction that is known here"), ("qwen3_next", r"tensors mtp\.")],
)
def test_a_checkpoint_without_a_head_is_refused_by_name(
    kind: str, sentence: str, folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    with pytest.raises(LoadError, match=sentence):
        open_engine(folder_of(kind), speculation="mtp")


def test_a_push_without_the_head_is_refused_and_serving_goes_on(open_engine: Callable[..., Engine], tmp_path: Path):
    with_head, without = tmp_path / "with", tmp_path / "without"
    mtp_checkpoints.build("glm4_moe", with_head)
    model = mtp_checkpoints.oracle_model("glm4_moe")
    for name, tensor in mtp_checkpoints.saved("glm4_moe", model, without).items():
        mtp_checkpoints.save_file({name: tensor}, without / f"model-{name}.safetensors")
    engine = open_engine(with_head, speculation="mtp")
    error = engine.stage_weights(str(without), 1).exception(120)
    assert "the weights lack model.layers.3.eh_proj.weight" in str(error)
    sequence = Sequence(token_ids=[BOS, 7], sampling=Sampling(max_tokens=9, temperature=0, ignore_eos=True))
    engine.add([sequence]).result(60)
    assert sequence.num_generated == 9
    assert open_engine(with_head).stage_weights(str(without), 1).result(120).speculation == "off"


def test_pushed_weights_propose_with_the_head_that_came_with_them(open_engine: Callable[..., Engine], tmp_path: Path):
    mtp_checkpoints.build("glm4_moe", tmp_path / "first")
    mtp_checkpoints.build("glm4_moe", tmp_path / "second", agrees=True)
    engine = open_engine(tmp_path / "first", speculation="mtp")
    engine.stage_weights(str(tmp_path / "second"), 1).result(120)
    engine.switch_weights().result(60).result(60)
    sequence = Sequence(token_ids=[BOS, 7], sampling=Sampling(max_tokens=30, temperature=0, ignore_eos=True))
    engine.add([sequence]).result(60)
    assert sequence.num_accepted == sequence.num_proposed > 10
    engine.drop_weights().result(60)
    again = Sequence(token_ids=[BOS, 7], sampling=Sampling(max_tokens=30, temperature=0, ignore_eos=True))
    engine.add([again]).result(60)
    assert (again.token_ids, again.num_accepted) == (sequence.token_ids, again.num_proposed)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_adapters_of_a_checkpoint_with_a_head_equal_peft(kind: str, open_engine: Callable[..., Engine], tmp_path: Path):
    mtp_checkpoints.build(kind, tmp_path / "model", agrees=True)
    adapter = save_adapter(tmp_path / "model", tmp_path / "adapter", 0, target_modules=["q_proj", "v_proj", "o_proj"])
    oracle = oracle_with(tmp_path / "model", adapter)
    found: list[Sequence] = []
    for speculation in ("off", "mtp"):
        engine = open_engine(tmp_path / "model", speculation=speculation, adapters=(("a", str(adapter)),))
        sampling = Sampling(max_tokens=30, temperature=0, ignore_eos=True)
        found.append(Sequence(token_ids=[BOS, 7, 8, 9], sampling=sampling, adapter_name="a"))
        engine.add(found[-1:]).result(60)
        assert_agrees(found[-1], oracle)
    assert found[1].token_ids == found[0].token_ids
    assert found[1].num_proposed > 5


def test_ranks_drafts_and_requests_that_do_not_go_with_a_head_are_refused(engine_of: Callable[..., Engine]):
    with pytest.raises(ValueError, match="speculation 'mtp' needs a model in one process"):
        EngineSettings(model="x", ranks=2, speculation="mtp")
    with pytest.raises(ValueError, match="need each other"):
        EngineSettings(model="x", speculation="mtp", draft="y")
    asked = Sequence(token_ids=[BOS], sampling=Sampling(max_tokens=2), speculation="mtp")
    with pytest.raises(InvalidRequest, match="has speculation 'mtp'; expected off, which"):
        engine_of("llama").add([asked])


def test_a_row_that_proposes_nothing_keeps_its_own_hidden_states_only():
    """Those of the tokens that steps scored beside it would be gigabytes."""
    nothing_to_propose_with: Any = None
    head = PredictionHead(nothing_to_propose_with)
    row, scored = Sequence(token_ids=[1] * 3000, sampling=Sampling(max_tokens=5000)), Sequence(token_ids=[1] * 1000)
    mx.synchronize()
    before = mx.get_active_memory()
    for start in range(0, 3000, 100):  # a prompt in chunks
        piece = Slice(row, start, start + 100)
        head.observe_prompt([piece], mx.ones((1, 100, WIDTH)))
    mx.synchronize()
    after_prompt = mx.get_active_memory() - before
    for position in range(3000, 3100):
        rows = mx.full((1000, WIDTH), position)
        mx.eval(rows)
        head.observe([LogprobQuery(scored, range(1, 1000)), LogprobQuery(row, range(position, position + 1))], rows)
    del rows
    mx.synchronize()

    assert after_prompt <= 2 * MAX_MISSING * WIDTH * 4 + SMALL
    assert mx.get_active_memory() - before <= 2 * MAX_MISSING * WIDTH * 4 + SMALL
    head.forget([row])
    assert mx.get_active_memory() - before <= SMALL
