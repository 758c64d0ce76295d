"""Build the replies of `/v1/responses`, whole or as events. Pure.

A whole response is what its events add up to, so both have the same items: one for each run of tokens of one channel,
in their order.
"""

from collections.abc import Iterable

from msgspec import UNSET
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta
from scorepool.api.dialects.openai.chat_reply import TokenLogprob, token_logprobs
from scorepool.api.dialects.openai.response_object import (
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
)
from scorepool.api.dialects.openai.responses import ReasoningOptions, ResponseRequest, TextOptions
from scorepool.api.dialects.openai.structured_outputs import TextFormat
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.api.dialects.weights import weights_version
from scorepool.wire.batch import BatchUsage
from scorepool.wire.reply import ErrorBody


def to_response(
    body: ResponseRequest, result: wire.Result, unique_id: str, created: int, *, is_kept: bool = False
) -> ResponseObject:
    """Build the reply. `created` is in unix s."""
    writer = ResponseWriter(body, unique_id, created, is_kept=is_kept)
    for delta in ChoiceStream(0).end_runs(result.sequences[0]):
        writer.add_delta(delta)
    return writer.ended(result)


class ResponseWriter:
    """Translate the events of a response's job to its events.

    With `is_by_token` the events and their numbers follow from the answer alone: those of each token are its own,
    however the job's tokens come. A client that has some of them can then ask for the rest.
    """

    def __init__(
        self,
        body: ResponseRequest,
        unique_id: str,
        created: int,
        *,
        is_kept: bool = False,
        is_by_token: bool = False,
    ) -> None:
        self._body, self._unique_id, self._created, self._is_kept = body, unique_id, created, is_kept
        self._choice, self._is_by_token = ChoiceStream(0), is_by_token
        self._text: list[str] = []  # of the open item
        self._shown_logprobs: list[TokenLogprob] = []
        self._items: list[OutputItem] = []  # the last one may be open
        self._is_begun = self._is_open = False
        self._result: wire.Result | None = None
        self._num_events = 0

    def add(self, event: StreamEvent) -> list[object]:
        """Return the events that follow. Raise Diverged if a job ran again and generated other tokens."""
        events = [] if self._is_begun else self._begin()
        for delta in self._deltas(event):
            events += self.add_delta(delta)
        return events

    def _deltas(self, event: StreamEvent) -> Iterable[Delta]:
        if isinstance(event, wire.TokenDelta):
            return self._choice.add_each(event) if self._is_by_token else self._choice.add_runs(event)
        self._result = event.result
        assert event.result is not None
        [sequence] = event.result.sequences
        return self._choice.end_each(sequence) if self._is_by_token else self._choice.end_runs(sequence)

    def queued(self) -> list[object]:
        """Return the events of a response that is in the queue: with `is_by_token`, the first."""
        response = replace(self.unanswered(), status="queued")
        return [self._event(f"response.{name}", response=response) for name in ("created", "queued")]

    def failed(self, response: ResponseObject) -> list[object]:
        """Return the events that close a response without an answer."""
        return ([] if self._is_begun else self._begin()) + [self._event("response.failed", response=response)]

    def error(self, error: ErrorBody) -> bytes:
        """Return the event of an error that ends the stream, as OpenAI documents it and as its server sends it.

        With `is_by_token` it has the number of the event before it, because no other client gets it.
        """
        self._num_events -= self._is_by_token
        fields = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **fields, error=error)

    def end(self) -> list[object]:
        """Return the events that close the response."""
        assert self._result is not None
        response = self.ended(self._result)
        return [self._event(f"response.{response.status}", response=response)]

    def ended(self, result: wire.Result) -> ResponseObject:
        """Return the whole response, after its last delta."""
        is_cut = result.sequences[0].finish_reason == "length"
        return replace(
            self.unanswered(),
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            usage=BatchUsage.of_results([result]),
            logprobs_mode=result.logprobs_mode if self._body.has_logprobs else UNSET,
            draft_logprobs=UNSET if (proposed := result.sequences[0].draft_logprobs) is None else proposed,
            weights_version=weights_version([result], self._body.if_weights),
        )

    def add_delta(self, delta: Delta) -> list[object]:
        """Return the events of new tokens of one channel, and of the end of the answer with its last ones."""
        events: list[object] = []
        if delta.reasoning:
            events += self._open(ReasoningItem) + self._add_reasoning(delta.reasoning)
        logprobs = self._logprobs(delta)
        if delta.text or logprobs:
            events += self._open(MessageItem) + self._add_text(delta.text, logprobs)
        for call in delta.tool_calls:
            events += self._add_call(call)
        if delta.finish_reason is not None:
            if not self._items:
                events += self._open(MessageItem)
            events += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return events

    def _begin(self) -> list[object]:
        self._is_begun = True
        response = self.unanswered()
        names = ("in_progress",) if self._is_by_token else ("created", "in_progress")
        return [self._event(f"response.{name}", response=response) for name in names]

    def _logprobs(self, delta: Delta) -> list[TokenLogprob]:
        if not self._body.has_logprobs:
            return []
        return [one for one in token_logprobs(self._body, delta) if one.channel == "content"]

    def _open(self, kind: type[MessageItem | ReasoningItem]) -> list[object]:
        """Begin an item, unless one of this kind is open."""
        if self._is_open and isinstance(self._items[-1], kind):
            return []
        events = self._close("completed")
        part: OutputText | ReasoningText = OutputText(text="") if kind is MessageItem else ReasoningText(text="")
        prefix = "msg" if kind is MessageItem else "rs"
        self._items.append(kind(id=self._item_id(prefix), status="in_progress", content=[part]))  # type: ignore[list-item]
        self._is_open = True
        announced = replace(self._items[-1], content=[])
        return [
            *events,
            self._event("response.output_item.added", output_index=self._index, item=announced),
            self._part_event("response.content_part.added", part=part),
        ]

    def _add_reasoning(self, text: str) -> list[object]:
        self._text.append(text)
        return [self._part_event("response.reasoning_text.delta", delta=text)]

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> list[object]:
        self._text.append(text)
        self._shown_logprobs += logprobs
        return [self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _add_call(self, call: wire.ToolCallResult) -> list[object]:
        """Return the events of a whole call: its tokens are held back until it can be read."""
        events = self._close("completed")
        item = FunctionCallItem(
            id=self._item_id("fc"), status="completed", call_id=call.id, name=call.name, arguments=call.arguments
        )
        self._items.append(item)
        place = {"output_index": self._index, "item_id": item.id}
        begun = replace(item, status="in_progress", arguments="")
        return [
            *events,
            self._event("response.output_item.added", output_index=self._index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]

    def _close(self, status: ItemStatus) -> list[object]:
        """End the item that is open, if any."""
        if not self._is_open:
            return []
        self._is_open = False
        text, logprobs = "".join(self._text), self._shown_logprobs
        self._text, self._shown_logprobs = [], []
        part: OutputText | ReasoningText
        if isinstance(self._items[-1], MessageItem):
            part = OutputText(text=text, logprobs=logprobs)
        else:
            part = ReasoningText(text=text)
        item = self._items[-1] = replace(self._items[-1], status=status, content=[part])
        if isinstance(part, OutputText):
            done = self._part_event("response.output_text.done", text=part.text, logprobs=part.logprobs)
        else:
            done = self._part_event("response.reasoning_text.done", text=part.text)
        return [
            done,
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._unique_id}_{len(self._items)}"

    def _part_event(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1].id, output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)  # type: ignore[arg-type]
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + wire.encode_json(event) + b"\n\n"

    def unanswered(self) -> ResponseObject:
        """Return the response as it is before its answer is complete."""
        body = self._body
        return ResponseObject(
            id=f"resp_{self._unique_id}",
            created_at=self._created,
            status="in_progress",
            frequency_penalty=body.frequency_penalty or 0.0,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=body.model,
            output=list(self._items),
            background=bool(body.background),
            parallel_tool_calls=body.parallel_tool_calls is not False,
            presence_penalty=body.presence_penalty or 0.0,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or ReasoningOptions(),
            safety_identifier=body.safety_identifier,
            store=self._is_kept,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text if body.text and body.text.format else TextOptions(format=TextFormat()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )
