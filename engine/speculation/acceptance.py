"""How often a row's proposed tokens are accepted, known from those that were verified, and when to try again.

Nothing is known at first, so one token is proposed; after that at most twice as many as were accepted at once. A row
whose proposals do not pay is not verified any more, so its rate would never change. After a number of plain steps it
is tried again at a rate that would pay, with one token; the number doubles with each trial that fails.
"""

from dataclasses import dataclass

_FIRST_RATE = 0.7  # before anything was verified
_TRIAL_RATE = 0.6  # at which a row is tried again
_RATE_WEIGHT = 0.2  # of the latest token in the rate
_GUESS_WEIGHT = 0.25  # of the first rate, in tokens: so small that one wrong token ends a trial
_FIRST_WAIT = 32  # plain steps before a trial
_MAX_WAIT = 2048
_MIN_CHANCE = 0.15  # a proposed token that is less likely to be accepted is not worth the head of the model


@dataclass(slots=True)
class AcceptanceRate:
    """The chance that a proposed token of one row is accepted if all before it are."""

    rate: float = _FIRST_RATE
    max_proposed: int = 1  # tokens, until more are known to be accepted
    _num_verified: int = 0  # tokens since the first rate was guessed, or that of a trial
    _num_plain: int = 0
    _wait: int = _FIRST_WAIT

    def record(self, num_proposed: int, num_accepted: int) -> None:
        """Add a step: a plain one, or one that verified tokens up to the first that was rejected."""
        if not num_proposed:
            self._num_plain += 1
            if self._num_plain >= self._wait and self.rate < _TRIAL_RATE:
                self._num_plain, self._wait = 0, min(2 * self._wait, _MAX_WAIT)
                self.rate, self.max_proposed, self._num_verified = _TRIAL_RATE, 1, 0
            return
        self._num_plain = 0
        for index in range(min(num_accepted + 1, num_proposed)):
            self._num_verified += 1
            weight = max(_RATE_WEIGHT, 1 / (self._num_verified + _GUESS_WEIGHT))
            self.rate += weight * ((index < num_accepted) - self.rate)
        self.max_proposed = max(self.max_proposed, 2 * num_accepted)
        if num_accepted == num_proposed:
            self._wait = _FIRST_WAIT

    @property
    def is_guess(self) -> bool:
        """True if nothing was verified since the rate was guessed."""
        return not self._num_verified

    def num_worthwhile(self, max_tokens: int) -> int:
        """Return how many tokens are likely enough to be verified, at most `max_tokens`."""
        count, chance = 0, self.rate
        while count < max_tokens and chance >= _MIN_CHANCE:
            count, chance = count + 1, chance * self.rate
        return count
