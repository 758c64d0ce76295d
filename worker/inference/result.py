"""Rows that ran to wire.Result. Pure: no engine, no Redis, no clock."""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from math import fsum, inf, isnan

from scorepool import wire
from scorepool.engine import Sampling, Tokenizer
from scorepool.engine import Sequence as Row
from scorepool.wire import Floats
from scorepool.worker.inference.chat_answer import read_whole, told
from scorepool.worker.inference.translate import Translated
from scorepool.worker.rq.errors import JobError

LEAST = -9999.0  # what -inf is written as: JSON has no infinity


def to_result(
    request: wire.Request, rows: Sequence[Translated], tokenizer: Tokenizer, stamp: wire.Provenance
) -> wire.Result:
    """Raises JobError (numeric) at a NaN, ValueError where the engine's columns are not of one length."""
    if isinstance(request, wire.Tokenize):
        return _to_tokens(rows[0], tokenizer, stamp)
    if isinstance(request, wire.Score):
        prompt_tokens = sum(row.num_prompt_tokens for row in rows)
        with_logprobs = True
    else:
        prompt_tokens = rows[0].num_prompt_tokens  # n rows share it
        with_logprobs = request.logprobs
    return wire.Result(
        sequences=[_to_scored(row, _first(request, row.row), tokenizer, with_logprobs) for row in rows],
        temperature=request.temperature,
        usage=wire.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(row.row.token_ids) - row.num_prompt_tokens for row in rows),
        ),
        stamp=stamp,
    )


def _to_tokens(translated: Translated, tokenizer: Tokenizer, stamp: wire.Provenance) -> wire.Result:
    token_ids = translated.row.token_ids
    tokens = wire.SequenceResult(
        token_ids=token_ids,
        token_bytes=[tokenizer.token_bytes(token_id) for token_id in token_ids],
        text=tokenizer.decode(token_ids),
        num_prompt_tokens=len(token_ids),
        num_reported_prompt_tokens=len(token_ids),
        bos_added=translated.bos_added,
    )
    usage = wire.Usage(prompt_tokens=len(token_ids), completion_tokens=0)
    return wire.Result(sequences=[tokens], temperature=1.0, usage=usage, stamp=stamp)


def _first(request: wire.Score | wire.Generate, row: Row) -> int:
    """The first token that is reported. A prompt may be without logprobs: then the engine scored none of it."""
    if isinstance(request, wire.Generate):
        return 0 if request.prompt_logprobs else row.num_input_tokens
    return row.num_input_tokens if row.score_from is None else row.score_from


def _to_scored(translated: Translated, first: int, tokenizer: Tokenizer, with_logprobs: bool) -> wire.SequenceResult:
    row, num_prompt_tokens = translated.row, translated.num_prompt_tokens
    if row.constraint is not None and row.constraint.error is not None:
        raise JobError(wire.Failure(code="invalid", message=f"the answer's grammar: {row.constraint.error}"))
    token_ids = row.token_ids[first:]
    if row.text_bytes is None:
        text = tokenizer.decode(token_ids)
    else:
        given = b"".join(map(tokenizer.token_bytes, row.token_ids[first : row.num_input_tokens]))
        generated = row.token_ids[row.num_input_tokens :]
        text = (given + _without(translated.skipped_ids, generated, row.text_bytes, tokenizer)).decode(errors="replace")
    num_reported_prompt_tokens = max(0, num_prompt_tokens - first)
    said: dict[str, object] = {
        "token_ids": token_ids,
        "token_bytes": [tokenizer.token_bytes(token_id) for token_id in token_ids],
        "text": text,
        "num_prompt_tokens": num_prompt_tokens,
        "num_reported_prompt_tokens": num_reported_prompt_tokens,
        "prompt_token_ids": row.token_ids[:num_prompt_tokens] if translated.is_prompt_text else None,
        "bos_added": translated.bos_added,
        "finish_reason": row.finish_reason,
        "stop_reason": row.stop_reason.decode() if isinstance(row.stop_reason, bytes) else row.stop_reason,
        "skipped": numbers_of(translated.skipped_ids, row.token_ids[row.num_input_tokens :]),
    }
    if translated.chat is not None:
        part = read_whole(translated.chat, row, tokenizer)
        said["channels"], said["tool_calls"] = told(translated.chat, row, part, tokenizer)
    if not with_logprobs:
        return wire.SequenceResult(**said)  # type: ignore[arg-type]
    columns = _columns(row, token_ids, num_reported_prompt_tokens, tokenizer)
    if translated.again is not None:
        columns |= _recomputed(row, translated.again)
    return wire.SequenceResult(**said, **columns)  # type: ignore[arg-type]


def numbers_of(token_ids: AbstractSet[int], among: Sequence[int]) -> list[int]:
    """Where in a list of tokens these are."""
    return [number for number, token_id in enumerate(among) if token_id in token_ids]


def _without(skipped_ids: AbstractSet[int], token_ids: Sequence[int], text: bytes, tokenizer: Tokenizer) -> bytes:
    """What other tokens have in their text, which may end before, in or behind its last token."""
    if not skipped_ids:
        return text
    pieces = []
    end = 0
    for token_id in token_ids:
        begin, end = end, end + len(tokenizer.token_bytes(token_id))
        if token_id not in skipped_ids:
            pieces.append(text[begin:end])
    return b"".join(pieces)


def _recomputed(row: Row, again: Row) -> dict[str, object]:
    clamp = _Clamp()
    generated = row.columns.logprobs[len(row.columns.logprobs) - (len(row.token_ids) - row.num_input_tokens) :]
    pairs = [(clamp(sampled), clamp(scored)) for sampled, scored in zip(generated, again.columns.logprobs, strict=True)]
    gaps = [abs(sampled - scored) for sampled, scored in pairs if sampled is not None and scored is not None]
    return {
        "recomputed_logprobs": Floats(scored for _, scored in pairs),
        "recompute_gap": max(gaps, default=0.0),
    }


def _columns(row: Row, token_ids: list[int], num_prompt: int, tokenizer: Tokenizer) -> dict[str, object]:
    """What the engine found, one entry a token; `num_prompt` leading ones belong to the prompt."""
    clamp = _Clamp()
    logprobs = [clamp(logprob) for _, logprob in zip(token_ids, row.columns.logprobs, strict=True)]
    columns: dict[str, object] = {"logprobs": Floats(logprobs)}
    completion = logprobs[num_prompt:]
    if None not in completion:
        columns["logprob_sum"] = fsum(logprob for logprob in completion if logprob is not None)
    if row.top_logprobs:
        tops = [
            [(token_id, clamp(value)) for token_id, value in zip(ids, values, strict=True)]
            for _, ids, values in zip(token_ids, row.columns.top_ids, row.columns.top_logprobs, strict=True)
        ]
        columns["top_ids"] = [[token_id for token_id, _ in top] for top in tops]
        columns["top_bytes"] = [[tokenizer.token_bytes(token_id) for token_id, _ in top] for top in tops]
        columns["top_logprobs"] = [Floats(value for _, value in top) for top in tops]
        columns["is_greedy"] = _is_greedy(
            top[0][0] == token_id if top else None
            for token_id, top in zip(token_ids[num_prompt:], tops[num_prompt:], strict=True)
        )
    if row.rank:
        columns["ranks"] = [rank for _, rank in zip(token_ids, row.columns.ranks, strict=True)]
        columns["is_greedy"] = _is_greedy(
            None if rank is None else rank == 1 for rank in row.columns.ranks[num_prompt:]
        )
    if row.entropy:
        columns["entropies"] = Floats(
            clamp(entropy) for _, entropy in zip(token_ids, row.columns.entropies, strict=True)
        )
    if row.sampling is not None and (row.constraint is not None or _reshapes(row.sampling)):
        generated = row.token_ids[row.num_input_tokens :]
        columns["sampled_logprobs"] = Floats(
            clamp(logprob) for _, logprob in zip(generated, row.columns.sampled_logprobs, strict=True)
        )
    columns["clamped"] = clamp.count
    return columns


def _reshapes(sampling: Sampling) -> bool:
    """Whether tokens are drawn from another distribution than the model's own."""
    kept_whole = sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0
    return sampling.temperature != 1 or not kept_whole or sampling.needs_logits_processing or sampling.min_tokens > 0


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
            raise JobError(wire.Failure(code="numeric", message="the model computed NaN for a token of this job"))
        if value == -inf:
            self.count += 1
            return LEAST
        return value
