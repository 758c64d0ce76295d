"""Speak SGLang's API: `/generate`. `/v1/score` is in api/dialects/v1_score.py, because vLLM has the path too."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.sglang.endpoints import GENERATE

DIALECT = Dialect(tag="sglang", endpoints=(GENERATE,))
