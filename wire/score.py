"""Define the requests that score given tokens, under one model or under two."""

import hashlib
from collections.abc import Iterator
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import fields

from scorepool.wire.image import MAX_IMAGES, Image, Images, check_images
from scorepool.wire.request_fields import (
    MAX_LIST_LENGTH,
    CacheSalt,
    ModelName,
    OnItemError,
    Packed,
    ScoreTemperature,
    TargetIds,
    Text,
    TokenId,
    TokenIds,
    TopLogprobs,
    Truncate,
    UseCache,
)
from scorepool.wire.submission import Submission, _defaults


class ScoreItem(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Give a completion to score after a prompt, its own or the job's. Both are text, or both are token ids.

    Text is encoded jointly, and spaces at the end of the prompt move into the completion, as in lm-evaluation-harness.
    Token ids are used unchanged.
    """

    prompt: Text | TokenIds | None = None
    completion: Annotated[str, Meta(min_length=1, max_length=8_000_000)] | TokenIds
    targets: (
        Annotated[
            list[TokenId | TargetIds],
            Meta(
                max_length=MAX_LIST_LENGTH,
                description="Token ids whose logprobs are reported at each position: the same at all, or a list for "
                "each reported token, if `completion` is token ids.",
            ),
        ]
        | None
    ) = None
    images: Images = []

    def __post_init__(self) -> None:
        check_images(self.images, self.prompt)
        if self.prompt is not None and isinstance(self.prompt, str) != isinstance(self.completion, str):
            raise ValueError("`prompt` and `completion` must both be text or both be token ids")
        num_lists = sum(isinstance(each, list) for each in self.targets or ())
        if num_lists and num_lists != len(self.targets or ()):
            raise ValueError("`targets` must be token ids, or a list of token ids for each token; found both")
        if num_lists and isinstance(self.completion, str):
            raise ValueError("`targets` with a list for each token needs a `completion` of token ids")

    @property
    def target_lists(self) -> list[list[int]] | None:
        """The target ids of each reported token; None if `targets` are the same at all, or none."""
        lists = [each for each in self.targets or () if isinstance(each, list)]
        return lists or None


class Score(Submission, tag="score", frozen=True, kw_only=True):
    """Report how likely the model finds the given completions."""

    prompt: Annotated[
        Text | TokenIds | None, Meta(description="The prompt of every item. Then items give a `completion` only.")
    ] = None
    items: Annotated[list[ScoreItem], Meta(min_length=1, max_length=1024)]
    score: Annotated[
        Literal["completion", "all"],
        Meta(description="`all` also reports the prompt's tokens. The first token of a sequence has no logprob: null."),
    ] = "completion"
    top_logprobs: TopLogprobs = 0
    targets: (
        Annotated[
            TargetIds,
            Meta(description="Token ids whose logprobs are reported at every position. Items can have others."),
        ]
        | None
    ) = None
    temperature: ScoreTemperature = 1.0
    rank: Annotated[bool, Meta(description="Report each token's rank. 1 is the most likely token.")] = False
    entropy: Annotated[bool, Meta(description="Report the entropy, in nats, of each token's distribution.")] = False
    packed: Packed = False
    on_item_error: OnItemError = "fail"
    truncate: Truncate = None
    cache: UseCache = True
    cache_salt: CacheSalt = None
    images: Images = []

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_images()
        for index, item in enumerate(self.items):
            if (item.prompt is None) == (self.prompt is None):
                raise ValueError(f"`items[{index}].prompt` must be given, or `prompt` for all items, and not both")
            if self.prompt is not None and isinstance(self.prompt, str) != isinstance(item.completion, str):
                raise ValueError(f"`items[{index}].completion` must be text if `prompt` is, and token ids otherwise")
            if self.targets is not None and item.targets is not None:
                raise ValueError(f"`items[{index}].targets` must not be given beside `targets` for all items")
            self._check_num_targets(index, item)

    def _check_images(self) -> None:
        """Refuse what was not tested with images, or has no meaning: an image's tokens have no logprobs."""
        check_images(self.images, self.prompt)
        num_images = len(self.images) + sum(len(item.images) for item in self.items)
        if num_images > MAX_IMAGES:
            raise ValueError(f"the items have {num_images} images together; expected at most {MAX_IMAGES} in one job")
        for name, default in (("score", "completion"), ("truncate", None), ("adapter", None)):
            if num_images and getattr(self, name) != default:
                raise ValueError(f"`{name}` {getattr(self, name)} does not go with `images`")

    def _check_num_targets(self, index: int, item: ScoreItem) -> None:
        lists = item.target_lists
        if lists is None:
            return
        if self.truncate is not None:
            raise ValueError(f"`items[{index}].targets` with a list for each token does not go with `truncate`")
        prompt = (self.prompt or item.prompt or ()) if self.score == "all" else ()
        num_tokens = len(prompt) + len(item.completion)
        if len(lists) != num_tokens and self.on_item_error == "fail":  # else the worker reports the item
            raise ValueError(
                f"`items[{index}].targets` has {len(lists)} lists; expected {num_tokens}, one for each reported token"
            )

    def images_of(self, item: ScoreItem) -> list[Image]:
        """Return the images of an item's prompt."""
        return self.images if item.prompt is None else item.images

    def pairs(self) -> Iterator[tuple[str | list[int], str | list[int]]]:
        """Yield the prompt and the completion of each item."""
        for item in self.items:
            prompt = self.prompt if item.prompt is None else item.prompt
            assert prompt is not None
            yield prompt, item.completion


DEFAULT_COMPARED = 128  # most likely tokens of the base
NOT_COMPARED = ("images", "score", "targets", "entropy", "packed", "on_item_error", "truncate")


class Compare(Score, tag="compare", frozen=True, kw_only=True):
    """Score the same tokens under two models, and report how far their distributions are apart.

    A score job of `base` runs first, with the id that `base_job_id` of the result names; `model` scores its tokens
    then. Text is encoded by the base, and both models must have one vocabulary.
    """

    base: Annotated[ModelName, Meta(description="The model that `model` is compared with, such as the unquantised.")]
    top_logprobs: Annotated[
        TopLogprobs,
        Meta(
            description="The base's most likely tokens at each position, from which the divergence is computed with "
            "bounds for the rest. -1: all tokens, and the divergence is exact."
        ),
    ] = DEFAULT_COMPARED

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in _defaults(Score):
            if name in NOT_COMPARED and getattr(self, name) != default:
                raise ValueError(f"`{name}` does not go with a compare job; leave it out")
        if self.targets is not None or self.truncate is not None:
            raise ValueError(f"`{'truncate' if self.truncate else 'targets'}` does not go with a compare job")
        for index, item in enumerate(self.items):
            if item.targets is not None:
                raise ValueError(f"`items[{index}].targets` does not go with a compare job")
            if item.images:
                raise ValueError(f"`items[{index}].images` does not go with a compare job")
        if self.top_logprobs == 0:
            raise ValueError("`top_logprobs` must be at least 1, or -1 for the whole vocabulary")

    def base_request(self) -> Score:
        """Return the job of the base. `adapter`, `if_weights` and `webhook` are the model's."""
        own = ("model", "adapter", "if_weights", "webhook", "packed")
        names = [each.name for each in fields(Score) if each.name not in own]
        return Score(model=self.base, packed=True, **{name: getattr(self, name) for name in names})


def base_job_id(job_id: str) -> str:
    """Return the id of the base's job of a compare job."""
    return hashlib.blake2b(f"{job_id} base".encode(), digest_size=16).hexdigest()
