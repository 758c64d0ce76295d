"""Count what the engine computes. Knows no clock: engine.py adds the time of a step."""

from dataclasses import dataclass, field, replace
from itertools import chain

from scorepool.engine.scheduling.prefix_stats import PrefixStats
from scorepool.engine.scheduling.slice import SchedulerOutput, SliceResult


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start; the difference of two is what it computed between them."""

    steps: int = 0
    busy_s: float = 0.0  # spent in steps
    prompt_tokens: int = 0  # given tokens that went through the model
    cached_tokens: int = 0  # given tokens that sequences continued from instead
    scored_tokens: int = 0  # given tokens whose logprob was computed
    generated_tokens: int = 0  # sampled, with those that a stop string cuts off
    proposed_tokens: int = 0  # that steps verified
    accepted_tokens: int = 0  # of the proposed ones; they are generated tokens
    rows: int = 0  # sequences in a step, added up over all steps
    prefixes: PrefixStats = field(default_factory=PrefixStats)  # set by engine.py, as busy_s is
    fill: float = 0.0  # how full a step was, 0 to 1, added up over all steps

    def after(
        self, output: SchedulerOutput, num_paused: int, max_batch_tokens: int, max_running_rows: int
    ) -> "EngineStats":
        """Return the counters with one step more, in which some sequences were paused in place of being sampled from.

        A step is full at its limit of tokens or of decoding sequences.
        """
        prompt = cached = scored = rows = decoding = 0
        generated = -num_paused
        for slice_ in chain(output.slices, *output.background):
            samples = slice_.sequence.sampling is not None and slice_.end >= slice_.sequence.num_prefill
            generated += samples
            decoding += slice_.is_decode
            prompt += 0 if slice_.is_decode else slice_.num_tokens
            if slice_.fills_prefix is None:
                rows += 1
                cached += slice_.cached_prefix.length if slice_.cached_prefix else 0
                is_scored = slice_.sequence.score_from is not None and not slice_.is_decode
                scored += len(slice_.predictors) - samples if is_scored else 0
        fill = max((prompt + decoding) / max_batch_tokens, decoding / max_running_rows)
        return replace(
            self,
            steps=self.steps + 1,
            prompt_tokens=self.prompt_tokens + prompt,
            cached_tokens=self.cached_tokens + cached,
            scored_tokens=self.scored_tokens + scored,
            generated_tokens=self.generated_tokens + generated,
            rows=self.rows + rows,
            fill=self.fill + min(1.0, fill),
        )

    def after_read(self, results: list[SliceResult]) -> "EngineStats":
        """Return the counters with the proposed tokens of a step, now that those that were accepted are known."""
        verified = [result for result in results if result.slice.proposed_ids]
        if not verified:
            return self
        accepted = sum(result.num_accepted - 1 for result in verified)
        return replace(
            self,
            generated_tokens=self.generated_tokens + accepted,
            proposed_tokens=self.proposed_tokens + sum(len(result.slice.proposed_ids) for result in verified),
            accepted_tokens=self.accepted_tokens + accepted,
        )
