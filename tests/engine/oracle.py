"""What transformers on torch says: the whole sequence alone, no cache, float32 weights, float64 softmax."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine import Sequence


class Oracle:
    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.eos_id = self._model.config.eos_token_id

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        """[length, vocab]: row t is the distribution of token t + 1."""
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids]), use_cache=False).logits[0].double()
        return torch.log_softmax(logits / temperature, dim=-1).numpy()

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(max_tokens):
            token_ids.append(int(self.logprobs(token_ids)[-1].argmax()))
            if token_ids[-1] == self.eos_id:
                break
        return token_ids[len(prompt) :]


def assert_agrees(sequence: Sequence, oracle: Oracle, tolerance: float = 1e-4) -> None:
    """Every reported entry of a row that ran, given tokens and generated ones."""
    expected = oracle.logprobs(sequence.token_ids, sequence.temperature)
    own = oracle.logprobs(sequence.token_ids)
    first = sequence.num_given if sequence.score_from is None else sequence.score_from
    positions = range(first, len(sequence.token_ids))
    assert len(sequence.logprobs) == len(positions)
    for column in (sequence.top_ids, sequence.top_values):
        assert len(column) == (len(positions) if sequence.top_logprobs else 0)
    for entry, position in enumerate(positions):
        found = sequence.logprobs[entry]
        if position == 0:
            assert found is None
            continue
        row = (own if position >= sequence.num_given else expected)[position - 1]
        assert abs(found - row[sequence.token_ids[position]]) <= tolerance, (entry, position)
        if sequence.top_logprobs:
            likeliest = np.argsort(-row, kind="stable")[: sequence.top_logprobs]
            assert sequence.top_ids[entry] == likeliest.tolist()
            assert np.abs(np.array(sequence.top_values[entry]) - row[likeliest]).max() <= tolerance
        if sequence.rank:
            assert sequence.ranks[entry] == 1 + (row > row[sequence.token_ids[position]]).sum()
        if sequence.entropy:
            assert abs(sequence.entropies[entry] + (np.exp(row) * row).sum()) <= tolerance
