"""Translate the events of jobs to the events of SGLang's `/generate`: each repeats its output from the start. Pure."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from scorepool import wire
from scorepool.api.dialects.deltas import ChoiceStream, Delta, without_prompt
from scorepool.api.dialects.protocol import StreamEvent
from scorepool.api.dialects.sglang.generate import GenerateRequest
from scorepool.api.dialects.sglang.generate_reply import GenerateReply, MetaInfo, answer_id, entry_lists, to_answer

DONE = b"data: [DONE]\n\n"


class _Output:
    """One output so far."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.choice = ChoiceStream(index)
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: dict[str, list[Any]] = {}

    def append(self, body: GenerateRequest, delta: Delta, targets: list[int]) -> None:
        self.text += delta.text
        self.token_ids += delta.sequence.token_ids
        if not body.return_logprob:
            return
        for name, entries in entry_lists(body, delta.sequence, targets).items():
            self.logprobs.setdefault(f"output_{name}", []).extend(entries)


class GenerateWriter:
    """Track the outputs of all jobs. The last event of an output is what a reply that is not streamed has of it."""

    max_top_logprobs: int | UnsetType = UNSET  # what `top_logprobs_num` was clamped to, if it was

    def __init__(self, body: GenerateRequest, job_ids: Sequence[str], unique_id: str) -> None:
        n = body.params.num_choices
        self._body = body
        self._unique_id = unique_id
        self._jobs = {job_id: number for number, job_id in enumerate(job_ids)}
        self._outputs = {job_id: [_Output(job * n + i) for i in range(n)] for job_id, job in self._jobs.items()}
        self._num_prompt_tokens: dict[str, int] = {}  # by id of a job that began

    def add(self, event: StreamEvent) -> Sequence[object]:
        """Return the events that follow from one of a job. Raise Diverged if it contradicts what was sent."""
        if isinstance(event, wire.Job):
            return self._end(event)
        if event.num_prompt_tokens is not None:
            self._num_prompt_tokens[event.id] = event.num_prompt_tokens
        output = self._outputs[event.id][event.sequence]
        delta = output.choice.add(event)
        if delta is None:
            return []
        output.append(self._body, delta, self._body.targets[self._jobs[event.id]])
        if event.id not in self._num_prompt_tokens:  # its first tokens are missing
            return []
        info = MetaInfo(
            id=answer_id(self._body, self._unique_id, output.index),
            finish_reason=None,
            prompt_tokens=self._num_prompt_tokens[event.id],
            completion_tokens=len(output.token_ids),
        )
        info = replace(info, **output.logprobs)
        return [self._event(output, GenerateReply(text=output.text, output_ids=output.token_ids, meta_info=info))]

    def end(self) -> Sequence[object]:
        """Return the end of the stream."""
        return [DONE]

    def _end(self, job: wire.Job) -> Sequence[object]:
        assert job.result is not None
        body, number = self._body, self._jobs[job.id]
        events = []
        for output, sequence in zip(self._outputs[job.id], job.result.sequences, strict=True):
            output.choice.end(without_prompt(sequence))  # raises Diverged
            reply_id = answer_id(body, self._unique_id, output.index)
            answer = to_answer(body, body.prompts[number], body.targets[number], job.result, sequence, reply_id)
            if body.return_logprob:
                answer = replace(answer, meta_info=replace(answer.meta_info, max_top_logprobs=self.max_top_logprobs))
            events.append(self._event(output, answer))
        return events

    def _event(self, output: _Output, answer: GenerateReply) -> GenerateReply:
        return replace(answer, index=output.index) if self._body.is_list else answer
