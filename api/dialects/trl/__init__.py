"""Speak the API of `trl vllm-serve`: the route that a distilling trainer calls."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.trl.sequence_logprobs import GET_SEQUENCE_LOGPROBS

DIALECT = Dialect(tag="trl", endpoints=(GET_SEQUENCE_LOGPROBS,))
