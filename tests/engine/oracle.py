"""The reference: transformers on torch, each sequence alone, without a cache, float32 weights, float64 softmax."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, PretrainedConfig

from scorepool.engine import Sampling, Sequence
from tests.tiny_models import ORACLE_FOLDER
from tests.tiny_tokenizer import PAD

torch.set_num_threads(1)  # more threads are slower for tiny models


class Oracle:
    """transformers' model: of a folder, or the given one."""

    def __init__(self, model: Path | torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
        if isinstance(model, Path):
            folder = model / ORACLE_FOLDER if (model / ORACLE_FOLDER).exists() else model
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._model = model

    def logprobs(
        self, token_ids: list[int], temperature: float = 1.0, position_ids: list[int] | None = None
    ) -> np.ndarray:
        """Return [length, vocab]: row t is the distribution of token t + 1. `position_ids`: if not 0, 1, 2, ..."""
        given = {}
        if position_ids is not None:  # without a mask, transformers takes a gap for the end of a text
            given = {"position_ids": torch.tensor([position_ids]), "attention_mask": torch.ones(1, len(token_ids))}
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids]), use_cache=False, **given).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1).numpy()

    def greedy(self, token_ids: list[int], num_input_tokens: int) -> list[int]:
        """Return the most likely token at every position after the input: the generated tokens, if they are greedy."""
        return self.logprobs(token_ids)[num_input_tokens - 1 : -1].argmax(axis=-1).tolist()

    def generate(self, token_ids: list[int], max_tokens: int, **options: object) -> list[int]:
        """Return the tokens that transformers' greedy generate(), with its cache, appends."""
        input_ids = torch.tensor([token_ids])
        output = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            **options,
        )
        appended: list[int] = output[0, len(token_ids) :].tolist()
        return appended


def filter_as_transformers(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return [vocab]: the logprobs that transformers' generate() samples from, -inf for excluded tokens."""
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p or None,
    )
    model = GenerationMixin()
    model.config = PretrainedConfig()
    warpers = model._get_logits_processor(config, input_ids_seq_length=1)
    filtered = warpers(torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(logits[None]).double())[0]
    return torch.log_softmax(filtered, dim=-1).numpy()


def assert_agrees(sequence: Sequence, oracle: Oracle, tolerance: float = 1e-4) -> None:
    """Check every reported entry of a finished sequence, for input tokens and generated tokens."""
    unscaled = oracle.logprobs(sequence.token_ids)
    scaled = unscaled if sequence.temperature == 1 else oracle.logprobs(sequence.token_ids, sequence.temperature)
    first = sequence.num_input_tokens if sequence.score_from is None else sequence.score_from
    positions = range(first, len(sequence.token_ids))
    assert len(sequence.columns.logprobs) == len(positions)
    for column in (sequence.columns.top_ids, sequence.columns.top_logprobs):
        assert len(column) == (len(positions) if sequence.top_logprobs else 0)
    assert len(sequence.columns.target_logprobs) == (len(positions) if sequence.targets else 0)
    for entry, position in enumerate(positions):
        logprob = sequence.columns.logprobs[entry]
        if position == 0:
            assert logprob is None
            continue
        row = (unscaled if position >= sequence.num_input_tokens else scaled)[position - 1]
        if sequence.processed and position >= sequence.num_input_tokens:
            assert sequence.sampling
            row = filter_as_transformers(unscaled[position - 1], sequence.sampling)
        assert abs(logprob - row[sequence.token_ids[position]]) <= tolerance, (entry, position)
        if sequence.top_logprobs:
            ids, values = sequence.columns.top_ids[entry], np.array(sequence.columns.top_logprobs[entry])
            assert len(set(ids)) == sequence.top_logprobs
            assert np.abs(values - np.sort(row)[::-1][: len(ids)]).max() <= tolerance
            assert np.abs(values - row[ids]).max() <= tolerance
            assert_same_order(ids, row, tolerance)
        if sequence.targets:
            target_ids, values = sequence.targets.at(entry), sequence.columns.target_logprobs[entry]
            assert np.abs(np.array(values) - row[list(target_ids)]).max(initial=0) <= tolerance
            assert len(values) == len(target_ids)
        if sequence.rank:
            chosen = row[sequence.token_ids[position]]
            lowest, highest = ((row > chosen + margin).sum() + 1 for margin in (tolerance, -tolerance))
            assert lowest <= sequence.columns.ranks[entry] <= highest
        if sequence.entropy:
            assert abs(sequence.columns.entropies[entry] + (np.exp(row) * row).sum()) <= tolerance


def assert_same_order(ids: list[int], row: np.ndarray, tolerance: float) -> None:
    """Check the order of ids, except between neighbours whose logprobs differ by less than twice the tolerance."""
    order = np.argsort(-row, kind="stable")[: len(ids) + 1]
    gaps = np.concatenate([[np.inf], -np.diff(row[order]), [np.inf] if len(ids) == len(row) else []])
    for rank, token_id in enumerate(ids):
        if min(gaps[rank], gaps[rank + 1]) > 2 * tolerance:
            assert token_id == order[rank], rank
