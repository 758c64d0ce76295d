"""wire.Request to rows of a batch, and rows to wire.Result. Pure: no engine, no Redis, no clock.

To add a kind of job: a branch in `to_rows` and one in `to_result`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum, inf, isnan
from typing import Any

from msgspec.structs import replace

import wire
from engine import Sampling, Tokenizer
from engine import Sequence as Row
from engine.errors import TooLong
from wire import Floats
from worker.failure import JobFailed

HOPELESS = 4
MAX_UNASKED_TOKENS = 4096  # of a generation that does not say how long it may be, where the context has room
LEAST = -9999.0  # what -inf is written as: JSON has no infinity


@dataclass(frozen=True, slots=True)
class Translated:
    """A row, and what the result must say about it that the row does not know."""

    row: Row
    num_prompt_tokens: int
    is_prompt_text: bool  # then the result returns the ids that were used
    bos_added: bool


def refuse_hopeless(request: wire.Request, tokenizer: Tokenizer, context_length: int) -> None:
    """Raises TooLong for a text that no tokenization fits into the context, before one is tried.

    Tokenizing megabytes takes a minute. HOPELESS leaves room for a normaliser that shortens the text.
    """
    most_bytes = HOPELESS * context_length * tokenizer.longest_token_bytes
    for text in _texts(request):
        if len(text) * 4 > most_bytes and (num_bytes := len(text.encode())) > most_bytes:
            raise TooLong(
                f"a text of {num_bytes} bytes is more than this model's context of {context_length} tokens can hold"
            )


def _texts(request: wire.Request) -> list[str]:
    if isinstance(request, wire.Score):
        return [text for item in request.items for text in (item.prompt, item.completion) if isinstance(text, str)]
    texts = [message.content for message in request.messages or ()]
    return [*texts, request.prompt] if isinstance(request.prompt, str) else texts


def with_seed(request: wire.Request, job_id: str) -> wire.Request:
    """Where none was asked for, the job's own: new for each job, and the same when it runs again after a death."""
    if not isinstance(request, wire.Generate) or request.seed is not None:
        return request
    digest = hashlib.blake2b(job_id.encode(), digest_size=7).digest()
    return replace(request, seed=int.from_bytes(digest, "big"))


def to_rows(request: wire.Request, tokenizer: Tokenizer, context_length: int) -> list[Translated]:
    """One row per item of a score job, n of a generate job. Raises engine.Refused, JobFailed.

    A tokenize job's is not for the engine: its tokens are the answer.
    """
    if isinstance(request, wire.Score):
        return [_to_scored_row(request, item, tokenizer) for item in request.items]
    if isinstance(request, wire.Tokenize):
        token_ids, bos_added = _encode_prompt(request, tokenizer)
        return [Translated(Row(token_ids=token_ids), len(token_ids), False, bos_added)]
    return _to_generating_rows(request, tokenizer, context_length)


def _to_scored_row(request: wire.Score, item: wire.ScoreItem, tokenizer: Tokenizer) -> Translated:
    prompt, completion = item.prompt, item.completion
    if isinstance(prompt, str) and isinstance(completion, str):
        token_ids, num_prompt_tokens, bos_added = tokenizer.encode_pair(prompt, completion)
    elif isinstance(prompt, list) and isinstance(completion, list):
        token_ids, num_prompt_tokens, bos_added = prompt + completion, len(prompt), False
    else:
        raise TypeError("wire.ScoreItem let a prompt and a completion of two kinds through")
    row = Row(
        token_ids=token_ids,
        score_from=0 if request.score == "all" else num_prompt_tokens,
        top_logprobs=request.top_logprobs,
        rank=request.rank,
        entropy=request.entropy,
        temperature=request.temperature,
    )
    return Translated(row, num_prompt_tokens, isinstance(prompt, str), bos_added)


def _to_generating_rows(request: wire.Generate, tokenizer: Tokenizer, context_length: int) -> list[Translated]:
    prompt_ids, bos_added = _encode_prompt(request, tokenizer)
    if not prompt_ids:
        message = "prompt: it is empty, and this model begins no text with a BOS; give at least one character"
        raise JobFailed(wire.Failure(code="invalid", message=message, field="prompt"))
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(MAX_UNASKED_TOKENS, context_length - len(prompt_ids)))
    stop = tuple(text.encode() for text in request.stop)
    rows = []
    for i in range(request.n):
        sampling = (
            None
            if max_tokens == 0
            else Sampling(
                max_tokens=max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                min_p=request.min_p,
                seed=None if request.seed is None else request.seed + i,
                stop=stop,
                logit_bias=tuple(request.logit_bias.items()),
                presence_penalty=request.presence_penalty,
                frequency_penalty=request.frequency_penalty,
                repetition_penalty=request.repetition_penalty,
            )
        )
        row = Row(
            token_ids=list(prompt_ids),
            score_from=0 if request.prompt_logprobs else None,
            top_logprobs=request.top_logprobs,
            rank=request.rank,
            sampling=sampling,
        )
        rows.append(Translated(row, len(prompt_ids), not isinstance(request.prompt, list), bos_added))
    return rows


def _encode_prompt(request: wire.Generate | wire.Tokenize, tokenizer: Tokenizer) -> tuple[list[int], bool]:
    if request.messages is not None:
        token_ids = tokenizer.encode_chat([_to_template(message) for message in request.messages])
        return token_ids, bool(token_ids) and token_ids[0] == tokenizer.bos_id
    if isinstance(request.prompt, str):
        return tokenizer.encode(request.prompt, request.add_bos)
    return list(request.prompt or ()), False


def _to_template(message: wire.Message) -> dict[str, Any]:
    """In the shape that chat templates read: OpenAI's, but for arguments, which are an object."""
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


def to_result(
    request: wire.Request, rows: Sequence[Translated], tokenizer: Tokenizer, stamp: wire.Stamp
) -> wire.Result:
    """Raises JobFailed (numeric) at a NaN, ValueError where the engine's columns are not of one length."""
    if isinstance(request, wire.Tokenize):
        return _to_tokens(rows[0], tokenizer, stamp)
    if isinstance(request, wire.Score):
        prompt_tokens = sum(row.num_prompt_tokens for row in rows)
        with_logprobs = True
    else:
        prompt_tokens = rows[0].num_prompt_tokens  # n rows share it
        with_logprobs = request.logprobs
    return wire.Result(
        sequences=[_to_scored(row, tokenizer, with_logprobs) for row in rows],
        temperature=request.temperature,
        usage=wire.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(row.row.token_ids) - row.num_prompt_tokens for row in rows),
        ),
        stamp=stamp,
    )


def _to_tokens(translated: Translated, tokenizer: Tokenizer, stamp: wire.Stamp) -> wire.Result:
    token_ids = translated.row.token_ids
    tokens = wire.Scored(
        token_ids=token_ids,
        token_bytes=[tokenizer.token_bytes(token_id) for token_id in token_ids],
        text=tokenizer.decode(token_ids),
        num_prompt_tokens=len(token_ids),
        num_reported_prompt_tokens=len(token_ids),
        bos_added=translated.bos_added,
    )
    usage = wire.Usage(prompt_tokens=len(token_ids), completion_tokens=0)
    return wire.Result(sequences=[tokens], temperature=1.0, usage=usage, stamp=stamp)


def _to_scored(translated: Translated, tokenizer: Tokenizer, with_logprobs: bool) -> wire.Scored:
    row, num_prompt_tokens = translated.row, translated.num_prompt_tokens
    first = row.num_given if row.score_from is None else row.score_from
    token_ids = row.token_ids[first:]
    if row.text_bytes is None:
        text = tokenizer.decode(token_ids)
    else:  # of the generated tokens, which end where a stop string begins
        given = b"".join(map(tokenizer.token_bytes, row.token_ids[first : row.num_given]))
        text = (given + row.text_bytes).decode(errors="replace")
    num_reported_prompt_tokens = max(0, num_prompt_tokens - first)
    said = {
        "token_ids": token_ids,
        "token_bytes": [tokenizer.token_bytes(token_id) for token_id in token_ids],
        "text": text,
        "num_prompt_tokens": num_prompt_tokens,
        "num_reported_prompt_tokens": num_reported_prompt_tokens,
        "prompt_token_ids": row.token_ids[:num_prompt_tokens] if translated.is_prompt_text else None,
        "bos_added": translated.bos_added,
        "finish_reason": row.finish_reason,
    }
    if not with_logprobs:
        return wire.Scored(**said)  # type: ignore[arg-type]
    return wire.Scored(**said, **_columns(row, token_ids, num_reported_prompt_tokens, tokenizer))  # type: ignore[arg-type]


def _columns(row: Row, token_ids: list[int], num_prompt: int, tokenizer: Tokenizer) -> dict[str, object]:
    """What the engine found, one entry a token; `num_prompt` leading ones belong to the prompt."""
    clamp = _Clamp()
    logprobs = [clamp(logprob) for _, logprob in zip(token_ids, row.logprobs, strict=True)]
    columns: dict[str, object] = {"logprobs": Floats(logprobs)}
    completion = logprobs[num_prompt:]
    if None not in completion:
        columns["logprob_sum"] = fsum(logprob for logprob in completion if logprob is not None)
    if row.top_logprobs:
        tops = [
            [(token_id, clamp(value)) for token_id, value in zip(ids, values, strict=True)]
            for _, ids, values in zip(token_ids, row.top_ids, row.top_values, strict=True)
        ]
        columns["top_ids"] = [[token_id for token_id, _ in top] for top in tops]
        columns["top_bytes"] = [[tokenizer.token_bytes(token_id) for token_id, _ in top] for top in tops]
        columns["top_logprobs"] = [Floats(value for _, value in top) for top in tops]
        columns["is_greedy"] = _is_greedy(
            top[0][0] == token_id if top else None
            for token_id, top in zip(token_ids[num_prompt:], tops[num_prompt:], strict=True)
        )
    if row.rank:
        columns["ranks"] = [rank for _, rank in zip(token_ids, row.ranks, strict=True)]
        columns["is_greedy"] = _is_greedy(None if rank is None else rank == 1 for rank in row.ranks[num_prompt:])
    if row.entropy:
        columns["entropies"] = Floats(clamp(entropy) for _, entropy in zip(token_ids, row.entropies, strict=True))
    if row.sampling is not None and _reshapes(row.sampling):
        generated = row.token_ids[row.num_given :]
        columns["sampled_logprobs"] = Floats(
            clamp(logprob) for _, logprob in zip(generated, row.sampled_logprobs, strict=True)
        )
    columns["clamped"] = clamp.count
    return columns


def _reshapes(sampling: Sampling) -> bool:
    """Whether tokens are drawn from another distribution than the model's own."""
    kept_whole = sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0
    return sampling.temperature != 1 or not kept_whole or sampling.moves_logits


def _is_greedy(likeliest: Iterable[bool | None]) -> bool | None:
    """Whether every token is the likeliest; None where one has no predictor."""
    known = list(likeliest)
    return None if None in known else all(known)


class _Clamp:
    """Makes -inf a number, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, value: float | None) -> float | None:
        if value is None:
            return None
        if isnan(value):
            raise JobFailed(wire.Failure(code="numeric", message="the model computed NaN for a token of this job"))
        if value == -inf:
            self.count += 1
            return LEAST
        return value
