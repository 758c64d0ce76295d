"""Speak Anthropic's API: messages, their tokens, and batches of them."""

from scorepool.api.dialects.anthropic.endpoints import COUNT_TOKENS, MESSAGES
from scorepool.api.dialects.protocol import Dialect

DIALECT = Dialect(tag="anthropic", endpoints=(MESSAGES, COUNT_TOKENS), form="anthropic")
