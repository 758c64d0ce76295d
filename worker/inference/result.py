"""Build a wire.Result from sequences that are done. Pure: no engine, no Redis, no clock."""

from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from math import isnan
from typing import Literal, TypedDict

from scorepool import wire
from scorepool.engine import ChatCodec, Sequence, Tokenizer
from scorepool.wire import Floats
from scorepool.worker.inference.chat_answer import channels_and_calls, parse_answer
from scorepool.worker.inference.classified import to_classified
from scorepool.worker.inference.columns import MIN_LOGPROB, CountingClamp, result_columns
from scorepool.worker.inference.embedded import to_embedded
from scorepool.worker.inference.packed import to_packed
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.summary import about, failed_item, summary


def to_result(
    request: wire.Request, prepared: Items[PreparedSequence], codec: ChatCodec, provenance: wire.Provenance
) -> wire.Result:
    """Return the job's result. Raises JobError (numeric) at a NaN, ValueError if the columns' lengths differ."""
    if isinstance(request, wire.Tokenize):
        return _to_tokenized(prepared[0], codec.tokenizer, provenance)
    if isinstance(request, wire.Classify):
        return to_classified(prepared, provenance)
    if isinstance(request, wire.Embed):
        return to_embedded(request, prepared, provenance)
    if isinstance(request, wire.Score):
        prompt_tokens = sum(each.num_prompt_tokens for each in prepared)
        with_logprobs = True
    else:
        prompt_tokens = prepared[0].num_prompt_tokens  # the n sequences share it
        with_logprobs = request.logprobs
    prompts = prepared if isinstance(request, wire.Score) else prepared[:1]
    first = [_first_reported(request, each.sequence) for each in prepared]
    if request.packed:
        sequences, packed = to_packed(prepared, first, with_logprobs)
    else:
        pairs = zip(prepared, first, strict=True)
        sequences, packed = [_to_sequence_result(each, start, codec, with_logprobs) for each, start in pairs], None
    return wire.Result(
        sequences=sequences,
        packed=packed,
        temperature=request.temperature,
        logprobs_mode=_logprobs_mode(request),
        usage=wire.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=sum(len(each.sequence.token_ids) - each.num_prompt_tokens for each in prepared),
            cached_tokens=_num_cached(request, prepared),
            kept_tokens=_num_kept(prepared[0].sequence),
            images=sum(len(each.sequence.images) for each in prompts),
            video_frames=_num_frames(prompts),
            **_speculation(prepared),
            proposed_tokens=sum(each.sequence.num_proposed for each in prepared),
            accepted_tokens=sum(each.sequence.num_accepted for each in prepared),
        ),
        stamp=provenance,
    )


class Speculation(TypedDict, total=False):
    """Type the fields of a wire.Usage that say what could propose tokens."""

    speculation: Literal["ngram", "draft", "mtp"]
    speculation_tokens: int


def _speculation(prepared: Items[PreparedSequence]) -> Speculation:
    """Return what could propose the tokens of the sequences that were computed, which all ask for the same."""
    for each in prepared:
        info, sequence = each.sequence.model_info, each.sequence
        if info is not None and not each.cached and (method := sequence.proposes_by(info.speculation)):
            most = info.speculation_tokens
            return {"speculation": method, "speculation_tokens": min(sequence.speculation_tokens or most, most)}
    return {}


def _num_cached(request: wire.Score | wire.Generate, prepared: Items[PreparedSequence]) -> int:
    """Count prompt tokens that were not computed for the job; those of a generation once, as they are read once."""
    numbers = [
        each.num_prompt_tokens if each.cached else min(each.sequence.num_cached, each.num_prompt_tokens)
        for each in prepared
    ]
    return sum(numbers) if isinstance(request, wire.Score) else min(numbers)


def _num_frames(prepared: Items[PreparedSequence]) -> int:
    """Count the frames of videos in prompts."""
    return sum(image.num_frames for each in prepared for image in each.sequence.images)


def _num_kept(sequence: Sequence) -> int | None:
    """Count the prompt tokens that went through the model, if not all of them need to; the others' are the same."""
    return None if sequence.keep_pct is None else sequence.num_input_tokens - sequence.num_left_out


def _logprobs_mode(request: wire.Score | wire.Generate) -> wire.LogprobsMode:
    if isinstance(request, wire.Generate):
        return request.logprobs_mode or "raw_logprobs"
    return "raw_logprobs" if request.temperature == 1 else "processed_logprobs"


def _to_tokenized(prepared: PreparedSequence, tokenizer: Tokenizer, provenance: wire.Provenance) -> wire.Result:
    token_ids = prepared.sequence.token_ids
    tokenized = wire.SequenceResult(
        token_ids=token_ids,
        token_bytes=tokenizer.bytes_of(token_ids),
        text=tokenizer.decode(token_ids),
        num_prompt_tokens=len(token_ids),
        num_reported_prompt_tokens=len(token_ids),
        bos_added=prepared.bos_added,
    )
    usage = wire.Usage(
        prompt_tokens=len(token_ids),
        completion_tokens=0,
        images=len(prepared.sequence.images),
        video_frames=_num_frames([prepared]),
    )
    return wire.Result(sequences=[tokenized], temperature=1.0, usage=usage, stamp=provenance)


def _first_reported(request: wire.Score | wire.Generate, sequence: Sequence) -> int:
    """Return the position of the first reported token. A prompt may be reported without having been scored."""
    if isinstance(request, wire.Generate):
        return 0 if request.prompt_logprobs else sequence.num_input_tokens
    return sequence.num_input_tokens if sequence.score_from is None else sequence.score_from


def _to_sequence_result(
    prepared: PreparedSequence, first: int, codec: ChatCodec, with_logprobs: bool
) -> wire.SequenceResult:
    if prepared.failure is not None:
        return failed_item(prepared.failure)
    sequence = prepared.sequence
    tokenizer = codec.tokenizer
    token_ids = sequence.token_ids[first:]
    token_bytes = tokenizer.bytes_of(token_ids)
    num_reported_prompt_tokens = max(0, prepared.num_prompt_tokens - first)
    fields: dict[str, object] = about(prepared, first) | {
        "token_ids": token_ids,
        "token_bytes": token_bytes,
        "text": _text(prepared, first, token_bytes, tokenizer),
        "skipped": indices_of(prepared.skipped_ids, sequence.token_ids[sequence.num_input_tokens :]),
    }
    if prepared.chat_prompt is not None:
        parsed = parse_answer(prepared.chat_prompt, sequence, codec)
        fields["channels"], fields["tool_calls"] = channels_and_calls(prepared.chat_prompt, sequence, parsed, codec)
    if with_logprobs:
        clamp = CountingClamp()
        fields |= result_columns(sequence, len(token_ids), tokenizer.bytes_of, clamp)
        fields["clamped"] = clamp.count
        fields["target_bytes"] = target_bytes(prepared, tokenizer)
        if sequence.reports_proposals:
            fields["draft_logprobs"] = draft_logprobs(sequence)
        fields |= summary(sequence, fields["logprobs"], num_reported_prompt_tokens)  # type: ignore[arg-type]
        if prepared.recomputed is not None:
            fields |= _recomputed(sequence, prepared.recomputed)
    return wire.SequenceResult(**fields)  # type: ignore[arg-type]


def _text(prepared: PreparedSequence, first: int, token_bytes: list[bytes], tokenizer: Tokenizer) -> str:
    """Return the text of the tokens from position `first` on. Bytes that are not UTF-8 become U+FFFD."""
    sequence = prepared.sequence
    if sequence.text_bytes is None:
        return b"".join(token_bytes).decode(errors="replace")
    prompt = b"".join(token_bytes[: max(0, sequence.num_input_tokens - first)])
    generated_ids = sequence.token_ids[sequence.num_input_tokens :]
    generated = _without_skipped(prepared.skipped_ids, generated_ids, sequence.text_bytes, tokenizer)
    return (prompt + generated).decode(errors="replace")


def _without_skipped(skipped_ids: AbstractSet[int], token_ids: Items[int], text: bytes, tokenizer: Tokenizer) -> bytes:
    """Remove the bytes of skipped tokens. The text may end before the end of the last token."""
    if not skipped_ids:
        return text
    pieces = []
    end = 0
    for token_id in token_ids:
        start, end = end, end + len(tokenizer.token_bytes(token_id))
        if token_id not in skipped_ids:
            pieces.append(text[start:end])
    return b"".join(pieces)


def indices_of(wanted_ids: AbstractSet[int], token_ids: Items[int]) -> list[int]:
    """Return the indices of the tokens that are in the set."""
    return [index for index, token_id in enumerate(token_ids) if token_id in wanted_ids]


def target_bytes(prepared: PreparedSequence, tokenizer: Tokenizer) -> list[bytes] | None:
    """Return the bytes of the targets of all tokens, if the result has them."""
    targets = prepared.sequence.targets
    if targets is None or not prepared.names_targets:
        return None
    return tokenizer.bytes_of(targets.at(0))


def draft_logprobs(sequence: Sequence) -> list[wire.DraftLogprob]:
    """Return the tokens that were proposed, with -inf as MIN_LOGPROB, and a draft's NaN too: an overflow.

    After a rejected token the model's logits may be NaN, which is no fault of the text. Tokens there are left out.
    """
    return [
        wire.DraftLogprob(
            position=proposed.position,
            token_id=proposed.token_id,
            draft_logprob=None if proposed.draft_logprob is None else max(MIN_LOGPROB, proposed.draft_logprob),
            logprob=max(proposed.logprob, MIN_LOGPROB),
            accepted=proposed.accepted,
        )
        for proposed in sequence.proposals
        if not isnan(proposed.logprob)
    ]


def _recomputed(sequence: Sequence, recomputed: Sequence) -> dict[str, object]:
    clamp = CountingClamp()
    logprobs = sequence.columns.logprobs
    generated = logprobs[len(logprobs) - sequence.num_generated :]
    pairs = [(clamp(one), clamp(other)) for one, other in zip(generated, recomputed.columns.logprobs, strict=True)]
    gaps = [abs(one - other) for one, other in pairs if one is not None and other is not None]
    return {
        "recomputed_logprobs": Floats(other for _, other in pairs),
        "recompute_gap": max(gaps, default=0.0),
    }
