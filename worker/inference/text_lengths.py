"""Encode texts in steps, and refuse those that cannot fit by their beginning. Pure."""

from collections.abc import Generator
from collections.abc import Sequence as Items
from typing import TypeVar

from scorepool import wire
from scorepool.engine import Tokenizer
from scorepool.engine.errors import ContextLengthExceeded
from scorepool.worker.rq.errors import JobError

T = TypeVar("T")
Steps = Generator[int, None, T]  # yields before each step how many characters it encodes, at most

MAX_TOKENIZED = 500_000  # of a tokenize job, or the context if it is longer; each costs the tokenizer 350 bytes


def check_length(texts: Items[str], tokenizer: Tokenizer, max_tokens: int, what: str) -> Steps[None]:
    """Check that the joined texts can have at most `max_tokens` tokens. Raises ContextLengthExceeded."""
    for size in tokenizer.head_sizes(sum(map(len, texts)), max_tokens):
        yield size
        head = "".join(texts)[:size]
        if tokenizer.is_longer(head, max_tokens):
            num_characters = sum(map(len, texts))
            raise ContextLengthExceeded(
                f"{what} has {num_characters} characters, of which the first {size} are already more than "
                f"{max_tokens} tokens, the most that fit",
                _item_field(what),
            )


def check_num_tokens(num_tokens: int, max_tokens: int, what: str) -> None:
    """Check the tokens of a text. Raises ContextLengthExceeded."""
    if num_tokens > max_tokens:
        raise ContextLengthExceeded(f"{what} has {num_tokens} tokens; at most {max_tokens} fit", _item_field(what))


def cut_prompt(
    token_ids: list[int],
    request: wire.Generate | wire.Classify | wire.Embed,
    tokenizer: Tokenizer,
    max_tokens: int,
    *,
    is_text: bool,
) -> list[int]:
    """Return the tokens of a prompt that `truncate` leaves. Raises JobError if `truncate_to` is more than fits."""
    if request.truncate is None:
        return token_ids
    if request.truncate_to is not None and request.truncate_to > max_tokens:
        sentence = f"expected at most {max_tokens}, which fit into the context, found {request.truncate_to}"
        raise invalid_request("truncate_to", sentence)
    return tokenizer.cut(token_ids, request.truncate_to or max_tokens, request.truncate, is_text=is_text)


def _item_field(what: str) -> str | None:
    """Return what is too long as a field, if it is an item. Otherwise it is the request's only text."""
    return what if what.startswith("items[") else None


def rendering_size(messages: Items[wire.Message], tools: Items[object]) -> int:
    """Return about as many characters as are encoded in the time in which a template renders the chat.

    Some templates look at all messages for each of them.
    """
    num_calls = sum(len(message.tool_calls) for message in messages)
    return len(messages) ** 2 + 64 * num_calls + 1024 * len(tools)


def invalid_request(field: str, message: str) -> JobError:
    return JobError(wire.Failure(code="invalid", message=f"{field}: {message}", field=field))
