"""What transformers on torch says: the whole sequence alone, no cache, float32 weights, float64 softmax."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from scorepool.engine import Sequence
from tests.tiny_models import ORACLE_FOLDER, PAD

torch.set_num_threads(1)  # tiny models: more threads cost more than they give


class Oracle:
    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        folder = folder / ORACLE_FOLDER if (folder / ORACLE_FOLDER).exists() else folder
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[length, vocab]: row t is the distribution of token t + 1."""
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1).numpy()

    def greedy(self, token_ids: list[int], num_input_tokens: int) -> list[int]:
        """The likeliest token at every position from num_given on: the tokens there, if those are greedy."""
        return self.logprobs(token_ids)[num_input_tokens - 1 : -1].argmax(axis=-1).tolist()

    def continued(self, token_ids: list[int], max_tokens: int, **options: object) -> list[int]:
        """What transformers' own greedy generate(), with its cache, appends."""
        given = torch.tensor([token_ids])
        whole = self._model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            **options,
        )
        appended: list[int] = whole[0, len(token_ids) :].tolist()
        return appended


def assert_agrees(sequence: Sequence, oracle: Oracle, tolerance: float = 1e-4) -> None:
    """Every reported entry of a row that ran, given tokens and generated ones."""
    own = oracle.logprobs(sequence.token_ids)
    expected = own if sequence.temperature == 1 else oracle.logprobs(sequence.token_ids, sequence.temperature)
    first = sequence.num_input_tokens if sequence.score_from is None else sequence.score_from
    positions = range(first, len(sequence.token_ids))
    assert len(sequence.columns.logprobs) == len(positions)
    for column in (sequence.columns.top_ids, sequence.columns.top_logprobs):
        assert len(column) == (len(positions) if sequence.top_logprobs else 0)
    for entry, position in enumerate(positions):
        found = sequence.columns.logprobs[entry]
        if position == 0:
            assert found is None
            continue
        row = (own if position >= sequence.num_input_tokens else expected)[position - 1]
        assert abs(found - row[sequence.token_ids[position]]) <= tolerance, (entry, position)
        if sequence.top_logprobs:
            ids, values = sequence.columns.top_ids[entry], np.array(sequence.columns.top_logprobs[entry])
            assert len(set(ids)) == sequence.top_logprobs
            assert np.abs(values - np.sort(row)[::-1][: len(ids)]).max() <= tolerance
            assert np.abs(values - row[ids]).max() <= tolerance
            assert_same_order(ids, row, tolerance)
        if sequence.rank:
            chosen = row[sequence.token_ids[position]]
            first, last = ((row > chosen + slack).sum() + 1 for slack in (tolerance, -tolerance))
            assert first <= sequence.columns.ranks[entry] <= last
        if sequence.entropy:
            assert abs(sequence.columns.entropies[entry] + (np.exp(row) * row).sum()) <= tolerance


def assert_same_order(ids: list[int], row: np.ndarray, tolerance: float) -> None:
    """The same ids in the same places, wherever both neighbours are further away than the tolerance allows."""
    order = np.argsort(-row, kind="stable")[: len(ids) + 1]
    gaps = np.concatenate([[np.inf], -np.diff(row[order]), [np.inf] if len(ids) == len(row) else []])
    for place, found in enumerate(ids):
        if min(gaps[place], gaps[place + 1]) > 2 * tolerance:
            assert found == order[place], place
