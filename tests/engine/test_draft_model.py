"""A draft model changes nothing but the time, and its logprobs are its own: compared with transformers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scorepool.engine import Engine, EngineSettings, InvalidRequest, LoadError, Sampling, Sequence
from tests.engine.oracle import Oracle, assert_agrees
from tests.engine.test_speculation import rows
from tests.tiny_tokenizer import BOS

FAMILIES = ["llama", "qwen3", "gpt2", "gpt_neox", "qwen3_moe"]


def cut_vocabulary(folder: Path, to: Path, num_rows: int) -> Path:
    """Copy a llama with fewer rows in its embedding and its head: less padding after the tokenizer's ids."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:num_rows].contiguous()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"vocab_size": num_rows}))
    return to


def disturb(folder: Path, to: Path, noise: float) -> Path:
    """Copy a model with noise in its weights: a draft that agrees often."""
    shutil.copytree(folder, to)
    generator = torch.Generator().manual_seed(0)
    for file in to.rglob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.ndim > 1:
                weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    return to


@pytest.fixture(autouse=True)
def three_proposals(always_propose: Callable[[Callable[[int], int]], None]):
    """Verify three tokens wherever there is room."""
    always_propose(lambda max_width: min(3, max_width))


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_a_plain_run_and_all_logprobs_those_of_transformers(
    name: str,
    engine_of: Callable[..., Engine],
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
    open_engine: Callable[..., Engine],
    tmp_path: Path,
):
    draft = disturb(folder_of(name), tmp_path / "draft", 0.1)
    plain, verified = rows(), rows()
    for future in [engine_of(name).add([sequence]) for sequence in plain]:
        future.result(60)
    for sequence in verified:
        sequence.reports_proposals = sequence.sampling is not None

    engine = open_engine(folder_of(name), speculation="draft", draft=str(draft))
    futures = [engine.add([sequence]) for sequence in verified]
    for future in futures:
        future.result(120)

    assert engine.model_info.speculation == "draft"
    of_draft, oracle = Oracle(draft), oracle_of(name)
    for one, other in zip(plain, verified, strict=True):
        assert (other.token_ids, other.finish_reason, other.text_bytes) == (
            one.token_ids,
            one.finish_reason,
            one.text_bytes,
        )
        assert_agrees(other, oracle)
        assert len(other.proposals) == other.num_proposed
        assert sum(proposed.accepted for proposed in other.proposals) == other.num_accepted
        assert_proposals_agree(other, of_draft, oracle)
    assert 0 < engine.stats.accepted_tokens < engine.stats.proposed_tokens


def assert_proposals_agree(sequence: Sequence, draft: Oracle, target: Oracle) -> None:
    """Compare both logprobs of every proposed token with transformers.

    A proposed token follows the row's own tokens, or those that were proposed before it in the same step.
    """
    step: list[int] = []  # proposed tokens
    last = -1
    for position, token_id, draft_logprob, logprob, accepted in sequence.proposals:
        start = sequence.num_input_tokens + position
        assert accepted == (sequence.token_ids[start : start + 1] == [token_id]) or not accepted
        contexts = {False: sequence.token_ids[:start]}
        if step and position == last + 1:
            contexts[True] = [*sequence.token_ids[: start - len(step)], *step]
        goes_on = next(
            goes_on
            for goes_on, context in contexts.items()
            if abs(draft_logprob - draft.logprobs(context)[-1][token_id]) < 1e-4
            and (sequence.processed or abs(logprob - target.logprobs(context)[-1][token_id]) < 1e-4)
        )
        step, last = [*step, token_id] if goes_on else [token_id], position


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_another_family_may_draft(
    name: str,
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Oracle],
    open_engine: Callable[..., Engine],
):
    engine = open_engine(folder_of(name), speculation="draft", draft=str(folder_of("llama")))
    verified = rows()
    for future in [engine.add([sequence]) for sequence in verified]:
        future.result(120)
    for sequence in verified:
        assert_agrees(sequence, oracle_of(name))
    assert engine.stats.proposed_tokens > 50


def test_the_model_as_its_own_draft_has_all_proposals_accepted_sampled_ones_too(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    engine = open_engine(folder_of("llama"), speculation="draft", draft=str(folder_of("llama")))
    sampled = [
        Sequence(
            token_ids=[BOS, 7, 8, number], sampling=Sampling(max_tokens=40, seed=number, top_k=50, ignore_eos=True)
        )
        for number in range(4)
    ]
    for future in [engine.add([sequence]) for sequence in sampled]:
        future.result(60)
    stats = engine.stats
    assert stats.proposed_tokens > 60
    assert stats.accepted_tokens >= stats.proposed_tokens - 2  # rounding may decide between two equal tokens
    assert stats.steps < 40


def test_a_long_prompt_rows_that_leave_and_rows_that_were_canceled(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], oracle_of: Callable[[str], Oracle]
):
    engine = open_engine(folder_of("llama"), speculation="draft", draft=str(folder_of("llama")))
    options = {"ignore_eos": True, "temperature": 0}
    long = Sequence(token_ids=[BOS, *[11, 12, 13] * 99], sampling=Sampling(max_tokens=30, **options))
    short = [
        Sequence(token_ids=[BOS, number], sampling=Sampling(max_tokens=5 * number, **options)) for number in range(3, 9)
    ]
    canceled = Sequence(token_ids=[BOS, 5], sampling=Sampling(max_tokens=90, **options))
    leaves = engine.add([canceled], on_step=lambda _: engine.cancel(leaves) if canceled.num_generated > 4 else None)
    futures = [engine.add([sequence]) for sequence in [*short, long]]
    for future in futures:
        future.result(60)
    for sequence in [*short, long]:
        assert_agrees(sequence, oracle_of("llama"))
    assert engine.stats.accepted_tokens > 50


@pytest.mark.parametrize(
    ("draft", "sentence"),
    [
        ("gemma3", "the draft model .*gemma3: it keeps a state or a sliding window"),
        ("demo", "the draft model .*demo: it has another vocabulary: token"),
        ("/nowhere", "the draft model /nowhere: there is no folder"),
    ],
)
def test_a_draft_that_cannot_work_is_refused_by_name(
    draft: str, sentence: str, folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    path = draft if draft.startswith("/") else str(folder_of(draft))
    with pytest.raises(LoadError, match=sentence):
        open_engine(folder_of("llama"), speculation="draft", draft=path)


def test_a_draft_reads_its_last_token_in_place_of_padding_that_it_lacks(
    engine_of: Callable[..., Engine],
    folder_of: Callable[[str], Path],
    open_engine: Callable[..., Engine],
    tmp_path: Path,
):
    folder = cut_vocabulary(folder_of("llama"), tmp_path / "draft", 370)
    engine, of_draft = open_engine(folder_of("llama"), speculation="draft", draft=str(folder)), Oracle(folder)

    def run(opened: Engine, padding: int, **options: Any) -> Sequence:
        sampling = Sampling(max_tokens=20, temperature=0, ignore_eos=True)
        sequence = Sequence(token_ids=[BOS, 5, padding, 9] * 70, sampling=sampling, **options)
        opened.add([sequence]).result(60)
        return sequence

    plain, verified = run(engine_of("llama"), 511), run(engine, 511, reports_proposals=True, speculation_tokens=1)
    assert verified.token_ids == plain.token_ids
    assert verified.proposals
    known = [min(token_id, 369) for token_id in verified.token_ids]
    for proposed in verified.proposals:
        row = of_draft.logprobs(known[: verified.num_input_tokens + proposed.position])[-1]
        assert proposed.draft_logprob == pytest.approx(row[proposed.token_id], abs=1e-4)
    assert run(engine, 511, keep_pct=30).kept == run(engine, 369, keep_pct=30).kept


def test_a_draft_with_fewer_tokens_than_the_tokenizer_is_refused(
    folder_of: Callable[[str], Path], open_engine: Callable[..., Engine], tmp_path: Path
):
    folder = cut_vocabulary(folder_of("llama"), tmp_path / "draft", 300)
    with pytest.raises(LoadError, match=r"the draft model .*vocab_size is 300, expected at least"):
        open_engine(folder_of("llama"), speculation="draft", draft=str(folder))


def test_settings_and_requests_that_need_a_draft_say_so(engine_of: Callable[..., Engine]):
    with pytest.raises(ValueError, match="need each other"):
        EngineSettings(model="x", speculation="draft")
    with pytest.raises(ValueError, match="need each other"):
        EngineSettings(model="x", draft="y")
    asks = Sequence(token_ids=[BOS], sampling=Sampling(max_tokens=1), reports_proposals=True)
    with pytest.raises(InvalidRequest, match="speculation"):
        engine_of("llama").add([asks])


def test_each_row_chooses_what_proposes_its_tokens_and_gets_those_of_a_plain_run(
    engine_of: Callable[..., Engine], folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    engine = open_engine(folder_of("llama"), speculation="draft", draft=str(folder_of("llama")))
    choices = [("off", None), ("ngram", None), ("draft", None), ("draft", 1), (None, 2)]

    def repeating() -> list[Sequence]:
        options = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        biases = [((7, 60.0),) if method == "ngram" else () for method, _ in choices]  # the draft model has none
        return [Sequence(token_ids=[BOS, 7, 8], sampling=Sampling(**options, logit_bias=bias)) for bias in biases]

    plain, chosen = repeating(), repeating()
    for sequence, (method, num_tokens) in zip(chosen, choices, strict=True):
        sequence.speculation, sequence.speculation_tokens = method, num_tokens
        sequence.reports_proposals = True
    engine_of("llama").add(plain).result(60)
    engine.add(chosen).result(120)
    assert [one.token_ids for one in chosen] == [one.token_ids for one in plain]
    off, by_ngrams, by_draft, one_token, usual = chosen
    assert off.num_proposed == 0
    assert by_ngrams.num_accepted > 10
    assert {proposed.draft_logprob for proposed in by_ngrams.proposals} == {None}
    for sequence in (by_draft, one_token, usual):
        assert sequence.num_accepted > 10
        assert None not in {proposed.draft_logprob for proposed in sequence.proposals}
    assert [one.proposes_by(engine.model_info.speculation) for one in chosen] == [
        None, "ngram", "draft", "draft", "draft"
    ]  # fmt: skip


@pytest.mark.parametrize(("speculation", "expected"), [("off", "off"), ("ngram", "off or ngram")])
def test_what_an_engine_has_not_is_refused_by_name(
    speculation: str, expected: str, folder_of: Callable[[str], Path], open_engine: Callable[..., Engine]
):
    engine = open_engine(folder_of("llama"), speculation=speculation)
    asked = Sequence(token_ids=[BOS], sampling=Sampling(max_tokens=2), speculation="draft")
    with pytest.raises(InvalidRequest, match=f"has speculation 'draft'; expected {expected}, which"):
        engine.add([asked])
