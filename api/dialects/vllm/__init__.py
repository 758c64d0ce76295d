"""Speak vLLM's API of token ids in and out, `/inference/v1/generate`, and of classifiers and rerankers."""

from scorepool.api.dialects.protocol import Dialect
from scorepool.api.dialects.vllm.classify import CLASSIFY
from scorepool.api.dialects.vllm.endpoints import GENERATE
from scorepool.api.dialects.vllm.render import RENDER_CHAT
from scorepool.api.dialects.vllm.rerank import RERANK
from scorepool.api.dialects.vllm.score import SCORE_PAIRS

DIALECT = Dialect(tag="vllm", endpoints=(GENERATE, RENDER_CHAT, CLASSIFY, SCORE_PAIRS, RERANK))
