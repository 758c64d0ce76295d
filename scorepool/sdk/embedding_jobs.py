"""Divide the items of `embed` into jobs. Pure."""

from collections.abc import Iterable, Iterator

from scorepool import wire
from scorepool.options import EmbedOptions
from scorepool.sdk.splitting import chunks

EmbedInput = str | list[int]


def embed_requests(model: str, items: Iterable[EmbedInput], options: EmbedOptions) -> Iterator[wire.Embed]:
    """Yield the jobs of `embed`. Raises TypeError, ValueError if there are no items."""
    if isinstance(items, str):
        raise TypeError("`items` is a str: expected a list of texts or of token ids")
    position = 0
    for chunk in chunks(items):
        converted = [_to_item(item, position + i) for i, item in enumerate(chunk)]
        yield wire.Embed(model=model, items=converted, **options)
        position += len(chunk)
    if not position:
        raise ValueError("`items` is empty: expected texts or token ids")


def _to_item(item: EmbedInput, position: int) -> wire.EmbedItem:
    is_ids = isinstance(item, list) and bool(item) and all(isinstance(token_id, int) for token_id in item)
    if not isinstance(item, str) and not is_ids:
        raise TypeError(f"`items[{position}]` is {wire.quote(repr(item))}: expected a str or a list of token ids")
    return wire.EmbedItem(prompt=item)
