"""Speak OpenAI's API with vLLM's additions: chat, completions, tokens, files and batches."""

from scorepool.api.dialects.openai.endpoints import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    EMBEDDINGS,
    INPUT_TOKENS,
    RESPONSES,
    TOKENIZE,
)
from scorepool.api.dialects.protocol import Dialect

DIALECT = Dialect(
    tag="openai",
    endpoints=(COMPLETIONS, CHAT, RESPONSES, INPUT_TOKENS, EMBEDDINGS, TOKENIZE, DETOKENIZE),
    error_codes={"model_not_served": "model_not_found"},
)
