"""wire.Request to rows of a batch. Pure: no engine, no Redis, no clock.

To add a kind of job: a branch in `to_rows`, and one in report.py's `to_result`.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from scorepool import wire
from scorepool.engine import Sampling, Tokenizer
from scorepool.engine import Sequence as Row
from scorepool.engine.errors import ContextLengthExceeded
from scorepool.worker.inference.chat_answer import Chat
from scorepool.worker.inference.structured_outputs import callable_tools, constraint_of
from scorepool.worker.rq.errors import JobError

HOPELESS = 4
MAX_UNASKED_TOKENS = 4096  # of a generation that does not say how long it may be, where the context has room


@dataclass(frozen=True, slots=True)
class Translated:
    """A row, and what the result must say about it that the row does not know."""

    row: Row
    num_prompt_tokens: int
    is_prompt_text: bool  # then the result returns the ids that were used
    bos_added: bool
    chat: Chat | None = None  # of a row that answers one
    skipped_ids: AbstractSet[int] = frozenset()  # of tokens that its text is without
    again: Row | None = None  # the same tokens, once generated, to be scored

    def to_recompute(self) -> "Translated":
        row = self.row
        return dataclasses.replace(self, again=Row(token_ids=list(row.token_ids), score_from=row.num_input_tokens))


def refuse_hopeless(request: wire.Request, tokenizer: Tokenizer, context_length: int) -> None:
    """Raises ContextLengthExceeded for a text that no tokenization fits into the context, before one is tried.

    Tokenizing megabytes takes a minute. HOPELESS leaves room for a normaliser that shortens the text.
    """
    most_bytes = HOPELESS * context_length * tokenizer.longest_token_bytes
    for text in _texts(request):
        if len(text) * 4 > most_bytes and (num_bytes := len(text.encode())) > most_bytes:
            raise ContextLengthExceeded(
                f"a text of {num_bytes} bytes is more than this model's context of {context_length} tokens can hold"
            )


def _texts(request: wire.Request) -> list[str]:
    if isinstance(request, wire.Score):
        return [text for item in request.items for text in (item.prompt, item.completion) if isinstance(text, str)]
    texts = [request.prompt] if isinstance(request.prompt, str) else []
    for message in request.messages or ():
        texts += [message.content, message.reasoning_content or ""]
        texts += [wire.encode_json(message.tool_calls).decode()] if message.tool_calls else []
    if isinstance(request, wire.Generate) and request.tools:
        texts.append(wire.encode_json(request.tools).decode())
    return texts


def with_seed(request: wire.Request, job_id: str) -> wire.Request:
    """Where none was asked for, the job's own: new for each job, and the same when it runs again after a death."""
    if not isinstance(request, wire.Generate) or request.seed is not None:
        return request
    digest = hashlib.blake2b(job_id.encode(), digest_size=7).digest()
    return replace(request, seed=int.from_bytes(digest, "big"))


def to_rows(request: wire.Request, tokenizer: Tokenizer, context_length: int) -> list[Translated]:
    """One row per item of a score job, n of a generate job. Raises engine.InvalidRequest, JobError.

    A tokenize job's is not for the engine: its tokens are the answer.
    """
    if isinstance(request, wire.Score):
        return [_to_scored_row(request, item, tokenizer) for item in request.items]
    if isinstance(request, wire.Tokenize):
        token_ids, bos_added, _ = _encode_prompt(request, tokenizer)
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
    prompt_ids, bos_added, chat = _encode_prompt(request, tokenizer)
    if not prompt_ids:
        message = "prompt: it is empty, and this model begins no text with a BOS; give at least one character"
        raise JobError(wire.Failure(code="invalid", message=message, field="prompt"))
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(max(MAX_UNASKED_TOKENS, request.min_tokens), context_length - len(prompt_ids)))
    _check_end(request, max_tokens, tokenizer)
    is_text = not isinstance(request.prompt, list)
    skipped_ids = tokenizer.markup.silent_ids if request.skip_special_tokens else frozenset()
    rows = []
    for i in range(request.n):
        row = Row(
            token_ids=list(prompt_ids),
            score_from=_score_from(request, len(prompt_ids), max_tokens),
            top_logprobs=request.top_logprobs,
            rank=request.rank,
            sampling=_sampling(request, i, max_tokens) if max_tokens else None,
            constraint=constraint_of(request, chat, tokenizer),
        )
        rows.append(Translated(row, len(prompt_ids), is_text, bos_added, chat, skipped_ids))
    return rows


def _sampling(request: wire.Generate, i: int, max_tokens: int) -> Sampling:
    """Of row number `i`."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=None if request.seed is None else request.seed + i,
        stop=tuple(text.encode() for text in request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        include_stop=request.include_stop_str_in_output,
        logit_bias=tuple(request.logit_bias.items()),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
    )


def _check_end(request: wire.Generate, max_tokens: int, tokenizer: Tokenizer) -> None:
    """That `min_tokens` can be had. Raises JobError."""
    if request.min_tokens > max_tokens:
        message = f"min_tokens: expected at most {max_tokens}, what fits into the context, found {request.min_tokens}"
        raise JobError(wire.Failure(code="invalid", message=message, field="min_tokens"))
    if request.min_tokens and len(tokenizer.eos_ids.union(request.stop_token_ids)) >= tokenizer.vocab_size:
        message = "stop_token_ids: they are all tokens of the model, so none can be generated before `min_tokens`"
        raise JobError(wire.Failure(code="invalid", message=message, field="stop_token_ids"))


def _score_from(request: wire.Generate, num_input_tokens: int, max_tokens: int) -> int | None:
    """Where the prompt is to be reported without logprobs, none are computed, but for one where nothing else runs."""
    if request.prompt_logprobs and request.logprobs:
        return 0
    return num_input_tokens - 1 if max_tokens == 0 else None


def _encode_prompt(request: wire.Generate | wire.Tokenize, tokenizer: Tokenizer) -> tuple[list[int], bool, Chat | None]:
    """Token ids, whether BOS is among them unasked, and what answers are read with where the prompt is a chat."""
    if request.messages is not None:
        return _encode_chat(request, request.messages, tokenizer)
    if isinstance(request.prompt, str):
        return *tokenizer.encode(request.prompt, request.add_bos), None
    return list(request.prompt or ()), False, None


def _encode_chat(
    request: wire.Generate | wire.Tokenize, messages: Sequence[wire.Message], tokenizer: Tokenizer
) -> tuple[list[int], bool, Chat]:
    keeps_special = False
    if isinstance(request, wire.Tokenize):
        may_call: list[dict[str, Any]] = []
        token_ids, opening = tokenizer.encode_chat(_to_template(messages))
    else:
        keeps_special = request.skip_special_tokens is False
        _check_template(request, tokenizer)
        tools = [_to_template_tool(tool) for tool in request.tools]
        may_call = [_to_template_tool(tool) for tool in callable_tools(request)]
        token_ids, opening = tokenizer.encode_chat(_to_template(messages), tools, request.chat_template_kwargs)
    return token_ids, bool(token_ids) and token_ids[0] == tokenizer.bos_id, Chat(opening, may_call, keeps_special)


def _check_template(request: wire.Generate, tokenizer: Tokenizer) -> None:
    """That what it would be given is not lost on it. Raises engine.InvalidRequest, JobError."""
    if request.tools and (reason := tokenizer.why_no_tools(may_call=request.tool_choice != "none")):
        raise JobError(wire.Failure(code="invalid", message=f"tools: {reason}", field="tools"))
    for name in request.chat_template_kwargs:
        if not tokenizer.knows_variable(name):
            field = f"chat_template_kwargs.{name}"
            message = f"{field}: the model's chat template has no variable of this name that a request may give"
            raise JobError(wire.Failure(code="invalid", message=message, field=field))


def _to_template(messages: Sequence[wire.Message]) -> list[dict[str, Any]]:
    """In the shape that chat templates read: OpenAI's, but for arguments, which are an object, and for the name of
    the function that a `tool` message answers."""
    called = {call.id: call.name for message in messages for call in message.tool_calls}
    return [_to_template_message(message, called) for message in messages]


def _to_template_message(message: wire.Message, called: Mapping[str, str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    name = message.name or called.get(message.tool_call_id or "") if message.role == "tool" else message.name
    if name is not None:
        shown["name"] = name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
        if not message.content:
            shown["thinking"] = message.reasoning_content  # gpt-oss's word; it refuses one that has content beside it
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return shown


def _to_template_tool(tool: wire.Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",  # some templates fail where there is none
        "parameters": tool.parameters or {"type": "object", "properties": {}},  # as OpenAI: it takes none
    }
    return {"type": "function", "function": function}
