"""Show the served models as Anthropic's API does. Pure."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool import wire


class AnthropicModel(Struct, frozen=True, kw_only=True):
    """Describe a name under which a model is served, with the fields that Anthropic's clients read."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: Annotated[datetime, Meta(description="The time at which the first of its workers loaded it.")]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Annotated[int, Meta(description="Tokens of the longest context among its workers.")]


class AnthropicModelPage(Struct, frozen=True, kw_only=True):
    """List the names under which models are served."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


def to_anthropic_model(model: wire.Model) -> AnthropicModel:
    """Show a model as Anthropic does."""
    return AnthropicModel(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC),
        max_input_tokens=model.max_model_len,
    )


def to_page(
    models: Mapping[str, wire.Model], limit: int, before_id: str | None, after_id: str | None
) -> AnthropicModelPage:
    """Show the first `limit` models after a name, or the last ones before one. A name that is gone is at the end."""
    names = list(models)
    if before_id is not None:
        left = names[: _place(names, before_id)]
        shown = left[-limit:]
    else:
        left = names if after_id is None else names[_place(names, after_id) + 1 :]
        shown = left[:limit]
    first_id, last_id = (shown[0], shown[-1]) if shown else (None, None)
    return AnthropicModelPage(
        data=[to_anthropic_model(models[name]) for name in shown],
        has_more=len(shown) < len(left),
        first_id=first_id,
        last_id=last_id,
    )


def _place(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)
