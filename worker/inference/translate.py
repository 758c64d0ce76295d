"""Translate a wire.Request into the engine's Sequences, text by text. Pure: no engine, no Redis, no clock.

Texts are encoded in steps, between which another job may have its turn (tokenizing.py). A text that cannot fit into the
context is refused by its beginning, before all of it is encoded.

To add a kind of job, add a branch to `to_sequences` and one to `to_result` in result.py.
"""

import hashlib
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

from msgspec.structs import replace

from scorepool import wire
from scorepool.engine import ChatCodec, Pooling, Sampling, Sequence, Targets
from scorepool.engine.images import PlacedImage, num_positions
from scorepool.wire.request_fields import DEFAULT_KEEP_PCT
from scorepool.worker.inference.chat_answer import ChatPrompt
from scorepool.worker.inference.exclusions import Exclusions, exclusions_of
from scorepool.worker.inference.images import RequestImages, check_images, spell_markers, with_markers
from scorepool.worker.inference.items import to_classified, to_embedded, to_scored
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.structured_outputs import callable_tools, constraints_of
from scorepool.worker.inference.template_messages import to_template_messages, to_template_tool
from scorepool.worker.inference.text_lengths import (
    MAX_TOKENIZED,
    Steps,
    check_length,
    check_num_tokens,
    cut_prompt,
    invalid_request,
    rendering_size,
)

DEFAULT_MAX_TOKENS = 4096  # of a generation that does not set max_tokens, if the context has room


def num_characters(request: wire.Request) -> int:
    """Return how many characters of text the request holds, without those of tools and calls."""
    if isinstance(request, wire.Score):
        return sum(len(text) for pair in request.pairs() for text in pair if isinstance(text, str))
    if isinstance(request, wire.Embed):
        return sum(len(item.prompt) for item in request.items if isinstance(item.prompt, str))
    if isinstance(request, wire.Classify):
        return sum(
            len(item.prompt) if isinstance(item.prompt, str) else _num_characters_of_chat(item.messages)
            for item in request.items
        )
    if isinstance(request.prompt, str):
        return len(request.prompt)
    return _num_characters_of_chat(request.messages)


def _num_characters_of_chat(messages: Items[wire.Message] | None) -> int:
    return sum(len(message.content) + len(message.reasoning_content or "") for message in messages or ())


def with_seed(request: wire.Request, job_id: str) -> wire.Request:
    """Derive a missing seed from the job's id: it differs between jobs and is the same if the job runs again."""
    if not isinstance(request, wire.Generate) or request.seed is not None:
        return request
    digest = hashlib.blake2b(job_id.encode(), digest_size=7).digest()
    return replace(request, seed=int.from_bytes(digest, "big"))


def to_sequences(
    request: wire.Request, codec: ChatCodec, context_length: int, owner: str = "", pooling: Pooling = "last"
) -> Steps[list[PreparedSequence]]:
    """Return one sequence per item of a score, classify or embed job, n of a generate job.

    Raises engine.InvalidRequest, ContextLengthExceeded, JobError. The sequence of a tokenize job does not go to the
    engine: its tokens are the answer.
    """
    check_images(request, codec)
    if isinstance(request, wire.Tokenize):
        prompt = yield from _encode_prompt(request, codec, max(context_length, MAX_TOKENIZED))
        token_ids = prompt.token_ids
        sequence = Sequence(token_ids=token_ids, images=prompt.images)
        return [PreparedSequence(sequence, len(token_ids), False, prompt.bos_added)]
    if isinstance(request, wire.Embed):
        return (yield from to_embedded(request, codec.tokenizer, context_length, pooling))
    if isinstance(request, wire.Classify):
        return (yield from to_classified(request, codec, context_length))
    if isinstance(request, wire.Score):
        prepared = yield from to_scored(request, codec, context_length)
    else:
        prepared = yield from _to_generated(request, codec, context_length, owner)
    num_tokens = [_num_reported(each.sequence) for each in prepared]
    num_targets = sum(
        each.sequence.targets.count(num)
        for each, num in zip(prepared, num_tokens, strict=True)
        if each.sequence.targets
    )
    if excess := wire.report_excess(request, sum(num_tokens), num_targets):
        raise invalid_request(*excess)
    return prepared


def _num_reported(sequence: Sequence) -> int:
    """Return how many tokens the result may report of a sequence that has not begun."""
    num_given = 0 if sequence.score_from is None else len(sequence.token_ids) - sequence.score_from
    return num_given + (sequence.sampling.max_tokens if sequence.sampling else 0)


def _to_generated(
    request: wire.Generate, codec: ChatCodec, context_length: int, owner: str
) -> Steps[list[PreparedSequence]]:
    most_encoded = context_length if request.truncate is None else max(context_length, MAX_TOKENIZED)
    prompt = yield from _encode_prompt(request, codec, most_encoded)
    given_ids, chat_prompt = prompt.token_ids, prompt.chat_prompt
    num_free = _num_free(request, len(given_ids), context_length)
    is_text = isinstance(request.prompt, str)
    prompt_ids = cut_prompt(given_ids, request, codec.tokenizer, max(1, context_length - num_free), is_text=is_text)
    if not prompt_ids:
        sentence = "it is empty, and this model's texts begin without BOS; give at least one character"
        raise invalid_request("prompt", sentence)
    max_tokens = request.max_tokens
    if max_tokens is None:
        num_taken = max(len(prompt_ids), num_positions(prompt.images, len(prompt_ids)))
        max_tokens = max(1, min(max(DEFAULT_MAX_TOKENS, request.min_tokens), context_length - num_taken))
    _check_min_tokens(request, max_tokens)
    exclusions = exclusions_of(request, codec.tokenizer)
    has_given_ids = isinstance(request.prompt, list) and request.truncate is None
    skipped_ids = codec.tokenizer.special_token_ids if request.skip_special_tokens else frozenset()
    is_processed = request.logprobs and request.logprobs_mode == "processed_logprobs"
    prepared = []
    for index, constraint in enumerate(constraints_of(request, chat_prompt, codec, owner)):
        sequence = Sequence(
            token_ids=list(prompt_ids),
            images=prompt.images,
            score_from=_score_from(request, len(prompt_ids), max_tokens),
            top_logprobs=request.top_logprobs,
            targets=None if request.targets is None else Targets([request.targets], is_shared=True),
            rank=request.rank,
            temperature=request.temperature if is_processed else 1.0,
            processed=is_processed,
            speculation=request.speculation,
            speculation_tokens=request.speculation_tokens,
            keep_pct=_keep_pct(request),
            reports_proposals=request.include_draft_logprobs,
            sampling=_sampling(request, index, max_tokens, exclusions) if max_tokens else None,
            constraint=constraint,
        )
        prepared.append(
            PreparedSequence(
                sequence,
                len(prompt_ids),
                not has_given_ids,
                prompt.bos_added and prompt_ids[:1] == given_ids[:1],  # that of a chat may be cut off
                chat_prompt,
                skipped_ids,
                request.target_bytes,
                num_truncated=len(given_ids) - len(prompt_ids),
            )
        )
    return prepared


def _num_free(request: wire.Generate, num_given: int, context_length: int) -> int:
    """Return how many tokens of the context a cut prompt leaves to the answer.

    If the job does not say how long its answer is, a prompt that fits stays whole, and a longer one leaves a quarter.
    """
    if request.max_tokens is not None:
        return max(request.max_tokens, request.min_tokens)
    if num_given < context_length or request.truncate_to is not None:
        return max(1, request.min_tokens)
    return max(1, min(DEFAULT_MAX_TOKENS, context_length // 4), request.min_tokens)


def _keep_pct(request: wire.Generate) -> float | None:
    """Return the percent of the prompt to keep; None: all of it."""
    if not request.specprefill:
        return None
    return DEFAULT_KEEP_PCT if request.specprefill_keep_pct is None else request.specprefill_keep_pct


def _sampling(request: wire.Generate, index: int, max_tokens: int, exclusions: Exclusions) -> Sampling:
    """Return the sampling parameters of completion number `index`."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=None if request.seed is None else request.seed + index,
        stop=tuple(text.encode() for text in request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        include_stop=request.include_stop_str_in_output,
        logit_bias=tuple(request.logit_bias.items()),
        allowed_bitmask=exclusions.allowed_bitmask,
        bad_words=exclusions.bad_words,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
    )


def _check_min_tokens(request: wire.Generate, max_tokens: int) -> None:
    """Check that `min_tokens` can be generated. Raises JobError."""
    if request.min_tokens > max_tokens:
        raise invalid_request(
            "min_tokens", f"expected at most {max_tokens}, which is what the context holds, found {request.min_tokens}"
        )


def _score_from(request: wire.Generate, num_input_tokens: int, max_tokens: int) -> int | None:
    """Return the first token to score.

    A prompt that is reported without logprobs is not scored. One token is scored if none is generated: a sequence must
    compute something.
    """
    if request.prompt_logprobs and request.logprobs:
        return 0
    return num_input_tokens - 1 if max_tokens == 0 else None


class _EncodedPrompt(NamedTuple):
    token_ids: list[int]
    bos_added: bool
    chat_prompt: ChatPrompt | None = None  # if the prompt is a chat
    images: tuple[PlacedImage, ...] = ()


def _encode_prompt(request: wire.Generate | wire.Tokenize, codec: ChatCodec, max_tokens: int) -> Steps[_EncodedPrompt]:
    if request.messages is not None:
        return (yield from _encode_chat(request, request.messages, codec, max_tokens))
    if isinstance(request.prompt, str):
        yield from check_length([request.prompt], codec.tokenizer, max_tokens, "prompt")
        yield len(request.prompt)
        images_of_request = RequestImages(codec)
        shown = yield from images_of_request.as_shown(wire.images_of(request))
        token_ids, bos_added = codec.tokenizer.encode(with_markers(request.prompt, shown, codec), request.add_bos)
        token_ids, images = yield from images_of_request.expand_markers(token_ids, shown)
        check_num_tokens(len(token_ids), max_tokens, "prompt")
        return _EncodedPrompt(token_ids, bos_added, images=images)
    return _EncodedPrompt(list(request.prompt or ()), False)


def _encode_chat(
    request: wire.Generate | wire.Tokenize, messages: Items[wire.Message], codec: ChatCodec, max_tokens: int
) -> Steps[_EncodedPrompt]:
    _check_template(request, codec)
    images_of_request = RequestImages(codec)
    messages, shown = yield from images_of_request.messages_as_shown(messages)
    template_messages = to_template_messages(messages)
    tools = [to_template_tool(tool) for tool in request.tools]
    may_call: list[dict[str, Any]] = []
    keep_special_tokens = False
    if isinstance(request, wire.Generate):
        may_call = [to_template_tool(tool) for tool in callable_tools(request)]
        keep_special_tokens = request.skip_special_tokens is False
    yield rendering_size(messages, tools)
    text, generation_prompt = codec.template.render(template_messages, tools, request.chat_template_kwargs)
    if shown:
        text = spell_markers(text, codec)
    yield from check_length([text], codec.tokenizer, max_tokens, "the rendered chat")
    yield len(text)
    token_ids, prompt_ids = codec.encode_rendered(text, generation_prompt)
    token_ids, images = yield from images_of_request.expand_markers(token_ids, shown)
    check_num_tokens(len(token_ids), max_tokens, "the rendered chat")
    chat_prompt = ChatPrompt(prompt_ids, may_call, keep_special_tokens)
    return _EncodedPrompt(token_ids, token_ids[:1] == [codec.tokenizer.bos_id], chat_prompt, images)


def _check_template(request: wire.Generate | wire.Tokenize, codec: ChatCodec) -> None:
    """Check that the template uses everything it would be given. Raises engine.InvalidRequest, JobError."""
    may_call = isinstance(request, wire.Generate) and request.tool_choice != "none"
    if request.tools and (reason := codec.tools_unsupported_reason(may_call=may_call)):
        raise invalid_request("tools", reason)
    for name in request.chat_template_kwargs:
        if not codec.template.accepts_variable(name):
            raise invalid_request(
                f"chat_template_kwargs.{name}",
                "the model's chat template has no variable of this name that a request may set",
            )
