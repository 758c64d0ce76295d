"""Bound what one owner has in Redis, in jobs and in bytes, so that no owner can fill it. store/lua/ledger.lua counts.

A job is admitted with the bytes that its result may take, so there is room for the results of all jobs that were
accepted. When it ends, what it really takes is counted. Results are recorded in any case, also beyond the limit.
"""

from typing import Any, NamedTuple, Self

from msgspec import Struct

from scorepool import store, wire
from scorepool.api.http.errors import ApiError, QueueFull, TooLarge
from scorepool.api.repositories.memory import memory_is_short
from scorepool.wire.request_fields import MAX_NUM_TOKENS, MAX_TARGETS, MAX_TOP_LOGPROBS

HALF = -1  # of Redis's maxmemory, as the scripts know it
MAX_RETRY_AFTER_S = 3600
MAX_CONTEXT = MAX_NUM_TOKENS  # of a model that no worker serves yet

SEQUENCE_BYTES = 512  # about, of a sequence in a result beside its tokens
TOKEN_BYTES = 40  # of a reported token: id, text, bytes, logprobs, rank, entropy, channel
TOP_TOKEN_BYTES = 16  # of one of the most likely tokens at a position
TARGET_BYTES = 4  # of the logprob of a target at a position
DEFAULT_MAX_TOKENS = 4096  # of a Generate without `max_tokens`


class Quota(Struct, frozen=True):
    """Hold the limits of each owner."""

    max_jobs: int  # 0: no limit
    max_bytes: int  # 0: no limit

    @classmethod
    def load(cls, settings: store.Settings, has_several_owners: bool) -> Self:
        """Read the limits. By default one owner alone has none, and one of several gets half of Redis's memory."""
        return cls(settings.max_jobs_per_key, settings.max_bytes_per_key or (HALF if has_several_owners else 0))


def refusal(answer: list[Any]) -> ApiError:
    """Build the error for an answer of a script: `no_memory`, or `over_quota` as in store/lua/submit.lua."""
    if answer[0] == b"no_memory":
        return memory_is_short()
    _, unit, used, num_new, most, first_check_s = answer
    setting = "SCOREPOOL_MAX_JOBS_PER_KEY" if unit == b"jobs" else "SCOREPOOL_MAX_BYTES_PER_KEY"
    noun = "jobs" if unit == b"jobs" else "bytes of jobs, results and files"
    if num_new > most:
        return TooLarge(f"{num_new} {noun} at once never fit: each key may have at most {most} ({setting})")
    return QueueFull(
        f"you have {used} {noun}, with what waiting jobs may become; with the {num_new} of this request there would be "
        f"more than {most} ({setting}), so nothing of it was accepted; they get fewer when jobs end and expire "
        "(SCOREPOOL_RESULT_TTL_S), and with DELETE /v1/jobs/{id} and DELETE /v1/files/{id}",
        min(max(first_check_s, 1), MAX_RETRY_AFTER_S),
    )


def job_bytes(request: wire.Request, body: bytes, context_length: int, is_of_batch: bool) -> int:
    """Return what a job may take at most, about, from its submission on. `body` is the encoded request.

    A character of text counts as a token. The line of a batch is stored beside its jobs until they have ended.
    """
    size = report_size(request, context_length)
    top_logprobs = _num_top(request)
    num_top = min(size.num_tokens * top_logprobs, MAX_TOP_LOGPROBS)
    token_bytes = size.num_tokens * TOKEN_BYTES + num_top * TOP_TOKEN_BYTES + size.num_targets * TARGET_BYTES
    result_bytes = size.num_sequences * SEQUENCE_BYTES + token_bytes
    webhook_bytes = store.DELIVERY_BYTES if request.webhook else 0  # the script adds those of endpoints
    return store.JOB_BYTES + webhook_bytes + len(body) * (2 if is_of_batch else 1) + result_bytes


def _num_top(request: wire.Request) -> int:
    request = wire.with_top_k(request, MAX_TARGETS)
    return request.top_logprobs if isinstance(request, wire.Score | wire.Generate) else 0


EMBEDDING_WIDTH = 4096  # about, of a model


class ReportSize(NamedTuple):
    """Say how much a result has."""

    num_sequences: int
    num_tokens: int
    num_targets: int  # logprobs of targets, at all tokens


def report_size(request: wire.Request, context_length: int, characters_per_token: int = 1) -> ReportSize:
    """Return at most how much a result has, about."""

    def length(text: str | list[int] | None) -> int:
        return len(text or "") // (characters_per_token if isinstance(text, str) else 1)

    if isinstance(request, wire.Classify):
        return ReportSize(len(request.items), 0, 0)
    if isinstance(request, wire.Embed):  # its numbers are packed as those of targets are
        return ReportSize(len(request.items), 0, len(request.items) * EMBEDDING_WIDTH)
    if isinstance(request, wire.Score):
        is_whole = request.score == "all"
        lengths = [
            min(length(item.completion) + (length(item.prompt or request.prompt) if is_whole else 0), context_length)
            for item in request.items
        ]
        num_targets = sum(
            sum(map(len, lists)) if (lists := item.target_lists) else len(item.targets or request.targets or ()) * each
            for item, each in zip(request.items, lengths, strict=True)
        )
        return ReportSize(len(request.items), sum(lengths), num_targets)
    if request.messages is not None:
        prompt_length = sum(length(message.content) for message in request.messages)
    else:
        prompt_length = length(request.prompt)
    prompt_length = min(prompt_length, context_length)
    if isinstance(request, wire.Tokenize):
        return ReportSize(1, prompt_length, 0)
    wanted = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    each = min(wanted, context_length) + (prompt_length if request.prompt_logprobs else 0)
    num_tokens = request.n * each
    return ReportSize(request.n, num_tokens, num_tokens * len(request.targets or ()))
