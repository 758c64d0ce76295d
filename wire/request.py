"""Define requests: what a client submits as a job. Each kind has a module of its own."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from msgspec.structs import replace

from scorepool.wire.classify import Classify
from scorepool.wire.embed import Embed
from scorepool.wire.generate import Generate
from scorepool.wire.image import Image
from scorepool.wire.request_fields import MAX_REPORTED_TOKENS, MAX_TARGET_LOGPROBS, MAX_TOP_LOGPROBS, WHOLE_VOCABULARY
from scorepool.wire.score import Compare, Score, base_job_id
from scorepool.wire.submission import Submission
from scorepool.wire.tokenize import Tokenize

AnyRequest = TypeVar("AnyRequest", bound=Submission)


def with_top_k(request: AnyRequest, vocab_size: int) -> AnyRequest:
    """Replace -1 `top_logprobs`, the whole vocabulary, by its size."""
    if isinstance(request, Score | Generate) and request.top_logprobs == WHOLE_VOCABULARY:
        return replace(request, top_logprobs=vocab_size)
    return request


def exceeds_top_cap(k: int, cap: int) -> bool:
    """True if k most likely tokens are more than the cap. -1 is the whole vocabulary, and as a cap none."""
    return cap != WHOLE_VOCABULARY and (k == WHOLE_VOCABULARY or k > cap)


def report_excess(request: "Request", num_tokens: int, num_targets: int) -> tuple[str, str] | None:
    """Return the field and the sentence that refuse a job whose result may report so much; None if it fits.

    `top_logprobs` of the request are a number, see `with_top_k`.
    `num_targets` counts the logprobs of targets at all tokens.
    """
    if num_tokens > MAX_REPORTED_TOKENS:
        field = "items" if isinstance(request, Score) else "n" if isinstance(request, Generate) else "prompt"
        most = f"at most {MAX_REPORTED_TOKENS} in one job, send several"
        return field, f"the result may report {num_tokens} tokens; expected {most}"
    top_logprobs = request.top_logprobs if isinstance(request, Score | Generate) else 0
    if num_tokens * top_logprobs > MAX_TOP_LOGPROBS:
        most = f"at most {MAX_TOP_LOGPROBS} top logprobs in the result of one job, send several"
        return "top_logprobs", f"{num_tokens} tokens with {top_logprobs} each; expected {most}"
    max_targets = MAX_TARGET_LOGPROBS
    if isinstance(request, Generate) and request.target_bytes:
        max_targets = MAX_TOP_LOGPROBS  # replies that show their text are as large as those of top logprobs
    if num_targets > max_targets:
        most = f"at most {max_targets} logprobs of targets in the result of one job, send several"
        return "targets", f"the result may have {num_targets}; expected {most}"
    return None


Request = Score | Compare | Generate | Tokenize | Classify | Embed
Kind = Literal["score", "compare", "generate", "tokenize", "classify", "embed"]


def with_bases(requests: Sequence[Request], job_ids: Sequence[str]) -> tuple[list[Request], list[str]]:
    """Return the jobs of a submission and their ids, with the base's job of each compare job before it."""
    pairs: list[tuple[Request, str]] = []
    for request, job_id in zip(requests, job_ids, strict=True):
        if isinstance(request, Compare):
            pairs.append((request.base_request(), base_job_id(job_id)))
        pairs.append((request, job_id))
    return [request for request, _ in pairs], [job_id for _, job_id in pairs]


def images_of(request: Request) -> Iterator[tuple[str, Image]]:
    """Yield each image of a request, with the name of its field."""
    if isinstance(request, Score | Generate):
        for index, image in enumerate(request.images):
            yield f"images[{index}]", image
    if isinstance(request, Score):
        for place, item in enumerate(request.items):
            for index, image in enumerate(item.images):
                yield f"items[{place}].images[{index}]", image
    if isinstance(request, Generate | Tokenize):
        for place, message in enumerate(request.messages or ()):
            for index, image in enumerate(message.images):
                yield f"messages[{place}].images[{index}]", image


def map_images(request: "Request", change: Callable[[Image], Image]) -> "Request":
    """Return the request with other images in the place of its own. Raises ValueError if it may not have them."""
    if isinstance(request, Score | Generate) and request.images:
        request = replace(request, images=[change(image) for image in request.images])
    if isinstance(request, Score) and any(item.images for item in request.items):
        items = [replace(item, images=[change(image) for image in item.images]) for item in request.items]
        request = replace(request, items=items)
    if isinstance(request, Generate | Tokenize) and any(message.images for message in request.messages or ()):
        messages = [
            replace(message, images=[change(image) for image in message.images]) if message.images else message
            for message in request.messages or ()
        ]
        request = replace(request, messages=messages)
    return request


def kind_of(request: Request) -> Kind:
    """Return the `type` that the request has in JSON."""
    return request.__struct_config__.tag  # type: ignore[return-value]
