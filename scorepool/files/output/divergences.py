"""Summarise how far two models are apart at the tokens of all rows, in bounded memory. The journal keeps it."""

from collections.abc import Iterable
from math import exp, floor, inf, log

from msgspec import Struct, field

from scorepool.files.output.means import Mean
from scorepool.files.rows import TokenComparison

BINS_PER_E = 2**9  # between a divergence and e times it: quantiles are within 0.1 %
LEAST = 1e-9  # nats; less is rounding, and counts as this


class Kld(Struct, frozen=True, kw_only=True):
    """Summarise KL divergences, in nats, over all tokens. The quantiles are within 0.1 %."""

    mean: float
    median: float
    p99: float
    max: float


class Distribution(Struct):
    """The divergences of tokens: mean and maximum are exact, quantiles nearly."""

    mean: Mean = field(default_factory=Mean)
    maximum: float = -inf
    counts: dict[int, int] = {}  # by bin

    def add(self, value: float) -> None:
        """Take one more value."""
        self.mean.add(value)
        self.maximum = max(self.maximum, value)
        place = floor(log(max(value, LEAST)) * BINS_PER_E)
        self.counts[place] = self.counts.get(place, 0) + 1

    def quantile(self, share: float) -> float:
        """Return the value below which this share of the values lies."""
        rank, seen = share * (self.mean.number - 1), 0
        for place, count in sorted(self.counts.items()):
            seen += count
            if seen > rank:
                return min(exp((place + 0.5) / BINS_PER_E), self.maximum)
        return self.maximum

    def summarise(self) -> Kld:
        return Kld(mean=self.mean.mean, median=self.quantile(0.5), p99=self.quantile(0.99), max=self.maximum)


class Divergence(Struct, frozen=True, kw_only=True):
    """Say how far a model is from the first one, over all tokens. Names as in llama.cpp's perplexity tool."""

    num_tokens: int
    kld_lower: Kld
    kld_upper: Kld
    kld_stderr: float | None  # of the mean, of `kld_lower`
    same_top_p: float
    mean_delta_p: float
    rms_delta_p: float
    perplexity: float
    base_perplexity: float


class Divergences(Struct):
    """The totals from which a Divergence follows, and to which tokens can be added."""

    kld_lower: Distribution = field(default_factory=Distribution)
    kld_upper: Distribution = field(default_factory=Distribution)
    same_top: Mean = field(default_factory=Mean)
    delta_p: Mean = field(default_factory=Mean)
    logprob: Mean = field(default_factory=Mean)
    base_logprob: Mean = field(default_factory=Mean)

    def add(self, tokens: Iterable[TokenComparison]) -> None:
        """Take the tokens of a row."""
        for token in tokens:
            self.kld_lower.add(token.kld_lower)
            self.kld_upper.add(token.kld_upper)
            self.same_top.add(token.same_top)
            self.delta_p.add(exp(token.logprob) - exp(token.base_logprob))
            self.logprob.add(token.logprob)
            self.base_logprob.add(token.base_logprob)

    def summarise(self) -> Divergence:
        """Return what is known of the tokens so far: at least one."""
        delta = self.delta_p
        return Divergence(
            num_tokens=delta.number,
            kld_lower=self.kld_lower.summarise(),
            kld_upper=self.kld_upper.summarise(),
            kld_stderr=self.kld_lower.mean.stderr,
            same_top_p=self.same_top.mean,
            mean_delta_p=delta.mean,
            rms_delta_p=(delta.squares / delta.number + delta.mean**2) ** 0.5,
            perplexity=_perplexity(self.logprob),
            base_perplexity=_perplexity(self.base_logprob),
        )


def _perplexity(logprob: Mean) -> float:
    try:
        return exp(-logprob.mean)
    except OverflowError:  # of logprobs that were -inf
        return inf
