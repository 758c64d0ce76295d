"""Translate the items of score and classify jobs into the engine's Sequences, text by text. Pure.

An item that cannot be run fails its job, or has its failure beside the others, as the request says.
"""

from typing import Literal

from scorepool import wire
from scorepool.engine import ChatCodec, Pooling, Sequence, Targets, Tokenizer
from scorepool.engine.errors import ContextLengthExceeded, EngineError, InvalidRequest
from scorepool.engine.images import PlacedImage
from scorepool.worker.inference.engine_errors import map_engine_error
from scorepool.worker.inference.images import RequestImages, with_markers
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.template_messages import to_template_messages
from scorepool.worker.inference.text_lengths import (
    MAX_TOKENIZED,
    Steps,
    check_length,
    check_num_tokens,
    cut_prompt,
    invalid_request,
    rendering_size,
)
from scorepool.worker.rq.errors import JobError


def to_scored(request: wire.Score, codec: ChatCodec, context_length: int) -> Steps[list[PreparedSequence]]:
    prepared = []
    images = RequestImages(codec)
    for index, pair in enumerate(request.pairs()):
        what = f"items[{index}]"
        try:
            each = yield from _to_scored_sequence(request, index, pair, codec, images, context_length, what)
        except _ITEM_ERRORS as error:
            prepared.append(_failed(request, error))
            continue
        each.sequence.targets = _targets(request, request.items[index])
        prepared.append(each)
    return prepared


_ITEM_ERRORS = (InvalidRequest, ContextLengthExceeded, JobError)


def _failed(request: wire.Score | wire.Classify, error: EngineError | JobError) -> PreparedSequence:
    """Return the place of an item that cannot be run. Raises the error if the job fails with it."""
    if request.on_item_error == "fail":
        raise error
    mapped = map_engine_error(error)
    assert isinstance(mapped, JobError)
    return PreparedSequence(Sequence(token_ids=[]), 0, False, False, failure=mapped.failure)


def _to_scored_sequence(
    request: wire.Score,
    index: int,
    pair: tuple[str | list[int], str | list[int]],
    codec: ChatCodec,
    images_of_request: RequestImages,
    context_length: int,
    what: str,
) -> Steps[PreparedSequence]:
    prompt, completion = pair
    tokenizer = codec.tokenizer
    images: tuple[PlacedImage, ...] = ()
    if isinstance(prompt, str) and isinstance(completion, str):
        yield from check_length((prompt, completion), tokenizer, _most_encoded(request, context_length), what)
        yield 2 * len(prompt) + len(completion)
        item = request.items[index]
        field = "images" if item.prompt is None else f"{what}.images"
        given = [(f"{field}[{number}]", image) for number, image in enumerate(request.images_of(item))]
        shown = yield from images_of_request.as_shown(given)
        text = with_markers(prompt, shown, codec)
        num_fixed = len(text) - len(prompt) + shown[-1].image.at if shown else 0  # to where the last image's text ends
        token_ids, num_prompt_tokens, bos_added = tokenizer.encode_pair(text, completion, num_fixed)
        num_markers = len(token_ids)
        token_ids, images = yield from images_of_request.expand_markers(token_ids, shown)
        num_prompt_tokens += len(token_ids) - num_markers
    elif isinstance(prompt, list) and isinstance(completion, list):
        token_ids, num_prompt_tokens, bos_added = prompt + completion, len(prompt), False
    else:
        raise TypeError("wire.ScoreItem accepted a prompt and a completion of different types")
    kept = _kept(request.truncate, len(token_ids), num_prompt_tokens, context_length, what)
    num_truncated = len(token_ids) - len(kept)
    token_ids, num_prompt_tokens = token_ids[kept.start : kept.stop], max(0, num_prompt_tokens - kept.start)
    sequence = Sequence(
        token_ids=token_ids,
        images=images,
        score_from=0 if request.score == "all" else num_prompt_tokens,
        fails_alone=request.on_item_error == "report",
        top_logprobs=request.top_logprobs,
        rank=request.rank,
        entropy=request.entropy,
        temperature=request.temperature,
    )
    return PreparedSequence(
        sequence, num_prompt_tokens, isinstance(prompt, str), bos_added and not kept.start, num_truncated=num_truncated
    )


def _most_encoded(request: wire.Score | wire.Classify | wire.Embed, context_length: int) -> int:
    """Return how many tokens of an item are encoded at most."""
    return context_length if request.truncate is None else max(context_length, MAX_TOKENIZED)


def _kept(
    truncate: Literal["left", "right"] | None, num_tokens: int, num_prompt_tokens: int, max_tokens: int, what: str
) -> range:
    """Return the positions of an item that are kept. Raises ContextLengthExceeded if it is too long.

    A token of the prompt stays if there is one, which predicts the first of the completion, and a token to report.
    """
    excess = max(0, num_tokens - max_tokens)
    if truncate is None:
        check_num_tokens(num_tokens, max_tokens, what)
    most = num_prompt_tokens - 1 if truncate == "left" else num_tokens - num_prompt_tokens - 1
    if excess and excess > most:
        part = "completion" if truncate == "left" else "prompt"
        raise ContextLengthExceeded(f"{what}: its {part} alone has too many tokens; at most {max_tokens} fit", what)
    return range(excess, num_tokens) if truncate == "left" else range(num_tokens - excess)


def to_classified(request: wire.Classify, codec: ChatCodec, context_length: int) -> Steps[list[PreparedSequence]]:
    prepared = []
    for index, item in enumerate(request.items):
        what = f"items[{index}]"
        try:
            token_ids = yield from _encode_classified(request, item, codec, context_length, what)
            is_text = isinstance(item.prompt, str)
            kept = cut_prompt(token_ids, request, codec.tokenizer, context_length, is_text=is_text)
            check_num_tokens(len(kept), context_length, what)
            if not token_ids:
                raise invalid_request(f"{what}.prompt", "it has no token for this model; give at least one character")
        except _ITEM_ERRORS as error:
            prepared.append(_failed(request, error))
            continue
        sequence = Sequence(token_ids=kept, classify=True, fails_alone=request.on_item_error == "report")
        num_truncated = len(token_ids) - len(kept)
        prepared.append(PreparedSequence(sequence, len(kept), False, False, num_truncated=num_truncated))
    return prepared


def _encode_classified(
    request: wire.Classify, item: wire.ClassifyItem, codec: ChatCodec, context_length: int, what: str
) -> Steps[list[int]]:
    """Return the token ids of an item. Raises engine.InvalidRequest, ContextLengthExceeded."""
    if isinstance(item.prompt, list):
        return list(item.prompt)
    text, adds_special_tokens = item.prompt, request.add_special_tokens
    if text is None:
        yield rendering_size(item.messages or (), [])
        text, adds_special_tokens = codec.template.render_given(to_template_messages(item.messages or ())), False
    yield from check_length([text], codec.tokenizer, _most_encoded(request, context_length), what)
    yield len(text)
    return codec.tokenizer.encode_whole(text) if adds_special_tokens else codec.tokenizer.encode(text, False)[0]


def to_embedded(
    request: wire.Embed, tokenizer: Tokenizer, context_length: int, pooling: Pooling
) -> Steps[list[PreparedSequence]]:
    """Return a sequence for each item, pooled as the request says, else as the model does by itself."""
    prepared = []
    for index, item in enumerate(request.items):
        what = f"items[{index}]"
        token_ids = item.prompt if isinstance(item.prompt, list) else []
        if isinstance(item.prompt, str):
            yield from check_length([item.prompt], tokenizer, _most_encoded(request, context_length), what)
            yield len(item.prompt)
            token_ids = (
                tokenizer.encode_whole(item.prompt)
                if request.add_special_tokens
                else tokenizer.encode(item.prompt, False)[0]
            )
        kept = cut_prompt(token_ids, request, tokenizer, context_length, is_text=isinstance(item.prompt, str))
        check_num_tokens(len(kept), context_length, what)
        if not token_ids:
            raise invalid_request(f"{what}.prompt", "it has no token for this model; give at least one character")
        sequence = Sequence(token_ids=list(kept), pooling=request.pooling or pooling)
        num_truncated = len(token_ids) - len(kept)
        prepared.append(PreparedSequence(sequence, len(kept), False, False, num_truncated=num_truncated))
    return prepared


def _targets(request: wire.Score, item: wire.ScoreItem) -> Targets | None:
    if lists := item.target_lists:
        return Targets([*lists], is_shared=False)
    ids = request.targets if item.targets is None else item.targets
    return None if ids is None else Targets([[each for each in ids if isinstance(each, int)]], is_shared=True)
