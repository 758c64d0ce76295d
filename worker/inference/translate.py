"""Translate a wire.Request into the engine's Sequences. Pure: no engine, no Redis, no clock.

To add a kind of job, add a branch to `to_sequences` and one to `to_result` in result.py.
"""

import dataclasses
import hashlib
from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from scorepool import wire
from scorepool.engine import ChatCodec, Sampling, Sequence, Tokenizer
from scorepool.engine.errors import ContextLengthExceeded
from scorepool.worker.inference.chat_answer import ChatPrompt
from scorepool.worker.inference.structured_outputs import callable_tools, constraint_of
from scorepool.worker.inference.template_messages import to_template_messages, to_template_tool
from scorepool.worker.rq.errors import JobError

MAX_SHORTENING = 4  # a normalizer may make a text this many times shorter
DEFAULT_MAX_TOKENS = 4096  # of a generation that does not set max_tokens, if the context has room


@dataclass(frozen=True, slots=True)
class PreparedSequence:
    """A sequence, and what the result reports about it that the engine does not know."""

    sequence: Sequence
    num_prompt_tokens: int
    is_prompt_text: bool  # then the result returns the ids that were used
    bos_added: bool
    chat_prompt: ChatPrompt | None = None  # of a sequence that answers a chat
    skipped_ids: AbstractSet[int] = frozenset()  # tokens that the text leaves out
    recomputed: Sequence | None = None  # the generated tokens, to be scored again

    def with_recompute(self) -> "PreparedSequence":
        sequence = self.sequence
        recomputed = Sequence(token_ids=list(sequence.token_ids), score_from=sequence.num_input_tokens)
        return dataclasses.replace(self, recomputed=recomputed)


def check_text_sizes(request: wire.Request, tokenizer: Tokenizer, context_length: int) -> None:
    """Check, before it is tokenized, that each text can fit into the context. Raises ContextLengthExceeded.

    Tokenizing megabytes takes a minute.
    """
    max_bytes = MAX_SHORTENING * context_length * tokenizer.max_token_bytes
    for text in _texts(request):
        if len(text) * 4 > max_bytes and (num_bytes := len(text.encode())) > max_bytes:
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
    """Derive a missing seed from the job's id: it differs between jobs and is the same if the job runs again."""
    if not isinstance(request, wire.Generate) or request.seed is not None:
        return request
    digest = hashlib.blake2b(job_id.encode(), digest_size=7).digest()
    return replace(request, seed=int.from_bytes(digest, "big"))


def to_sequences(request: wire.Request, codec: ChatCodec, context_length: int) -> list[PreparedSequence]:
    """Return one sequence per item of a score job, n of a generate job. Raises engine.InvalidRequest, JobError.

    The sequence of a tokenize job does not go to the engine: its tokens are the answer.
    """
    if isinstance(request, wire.Score):
        return [_to_scored(request, item, codec.tokenizer) for item in request.items]
    if isinstance(request, wire.Tokenize):
        token_ids, bos_added, _ = _encode_prompt(request, codec)
        return [PreparedSequence(Sequence(token_ids=token_ids), len(token_ids), False, bos_added)]
    return _to_generated(request, codec, context_length)


def _to_scored(request: wire.Score, item: wire.ScoreItem, tokenizer: Tokenizer) -> PreparedSequence:
    prompt, completion = item.prompt, item.completion
    if isinstance(prompt, str) and isinstance(completion, str):
        token_ids, num_prompt_tokens, bos_added = tokenizer.encode_pair(prompt, completion)
    elif isinstance(prompt, list) and isinstance(completion, list):
        token_ids, num_prompt_tokens, bos_added = prompt + completion, len(prompt), False
    else:
        raise TypeError("wire.ScoreItem accepted a prompt and a completion of different types")
    sequence = Sequence(
        token_ids=token_ids,
        score_from=0 if request.score == "all" else num_prompt_tokens,
        top_logprobs=request.top_logprobs,
        rank=request.rank,
        entropy=request.entropy,
        temperature=request.temperature,
    )
    return PreparedSequence(sequence, num_prompt_tokens, isinstance(prompt, str), bos_added)


def _to_generated(request: wire.Generate, codec: ChatCodec, context_length: int) -> list[PreparedSequence]:
    prompt_ids, bos_added, chat_prompt = _encode_prompt(request, codec)
    if not prompt_ids:
        raise _invalid("prompt", "it is empty, and this model's texts begin without BOS; give at least one character")
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(max(DEFAULT_MAX_TOKENS, request.min_tokens), context_length - len(prompt_ids)))
    _check_min_tokens(request, max_tokens, codec.tokenizer)
    is_text = not isinstance(request.prompt, list)
    skipped_ids = codec.tokenizer.special_token_ids if request.skip_special_tokens else frozenset()
    prepared = []
    for index in range(request.n):
        sequence = Sequence(
            token_ids=list(prompt_ids),
            score_from=_score_from(request, len(prompt_ids), max_tokens),
            top_logprobs=request.top_logprobs,
            rank=request.rank,
            sampling=_sampling(request, index, max_tokens) if max_tokens else None,
            constraint=constraint_of(request, chat_prompt, codec),
        )
        prepared.append(PreparedSequence(sequence, len(prompt_ids), is_text, bos_added, chat_prompt, skipped_ids))
    return prepared


def _sampling(request: wire.Generate, index: int, max_tokens: int) -> Sampling:
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
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
    )


def _check_min_tokens(request: wire.Generate, max_tokens: int, tokenizer: Tokenizer) -> None:
    """Check that `min_tokens` can be generated. Raises JobError."""
    if request.min_tokens > max_tokens:
        raise _invalid(
            "min_tokens", f"expected at most {max_tokens}, which is what the context holds, found {request.min_tokens}"
        )
    if request.min_tokens and len(tokenizer.eos_ids.union(request.stop_token_ids)) >= tokenizer.vocab_size:
        raise _invalid(
            "stop_token_ids", "they are all tokens of the model, so no token can be generated before `min_tokens`"
        )


def _score_from(request: wire.Generate, num_input_tokens: int, max_tokens: int) -> int | None:
    """Return the first token to score.

    A prompt that is reported without logprobs is not scored. One token is scored if none is generated: a sequence must
    compute something.
    """
    if request.prompt_logprobs and request.logprobs:
        return 0
    return num_input_tokens - 1 if max_tokens == 0 else None


def _encode_prompt(
    request: wire.Generate | wire.Tokenize, codec: ChatCodec
) -> tuple[list[int], bool, ChatPrompt | None]:
    """Return the prompt's token ids, whether BOS was added to them, and the ChatPrompt if the prompt is a chat."""
    if request.messages is not None:
        return _encode_chat(request, request.messages, codec)
    if isinstance(request.prompt, str):
        return *codec.tokenizer.encode(request.prompt, request.add_bos), None
    return list(request.prompt or ()), False, None


def _encode_chat(
    request: wire.Generate | wire.Tokenize, messages: Items[wire.Message], codec: ChatCodec
) -> tuple[list[int], bool, ChatPrompt]:
    template_messages = to_template_messages(messages)
    if isinstance(request, wire.Tokenize):
        token_ids, generation_prompt = codec.encode(template_messages)
        chat_prompt = ChatPrompt(generation_prompt, tools=())
    else:
        _check_template(request, codec)
        tools = [to_template_tool(tool) for tool in request.tools]
        token_ids, generation_prompt = codec.encode(template_messages, tools, request.chat_template_kwargs)
        may_call: list[dict[str, Any]] = [to_template_tool(tool) for tool in callable_tools(request)]
        chat_prompt = ChatPrompt(generation_prompt, may_call, request.skip_special_tokens is False)
    return token_ids, token_ids[:1] == [codec.tokenizer.bos_id], chat_prompt


def _check_template(request: wire.Generate, codec: ChatCodec) -> None:
    """Check that the template uses everything it would be given. Raises engine.InvalidRequest, JobError."""
    if request.tools and (reason := codec.tools_unsupported_reason(may_call=request.tool_choice != "none")):
        raise _invalid("tools", reason)
    for name in request.chat_template_kwargs:
        if not codec.template.accepts_variable(name):
            raise _invalid(
                f"chat_template_kwargs.{name}",
                "the model's chat template has no variable of this name that a request may set",
            )


def _invalid(field: str, message: str) -> JobError:
    return JobError(wire.Failure(code="invalid", message=f"{field}: {message}", field=field))
