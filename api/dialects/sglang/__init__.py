"""Speak SGLang's API: `/generate` and `/v1/score`."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.sglang.generate import GENERATE
from scorepool.api.dialects.sglang.score import SCORE

DIALECT = Dialect(tag="sglang", endpoints=(GENERATE, SCORE))
