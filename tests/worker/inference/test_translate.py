"""Requests become sequences: every parameter reaches the engine, and what cannot be done is refused."""

from typing import Any

import pytest

from scorepool import wire
from scorepool.engine import Targets
from scorepool.engine.errors import ContextLengthExceeded
from scorepool.worker.inference.prepared import PreparedSequence
from scorepool.worker.inference.translate import to_sequences, with_seed
from scorepool.worker.rq.errors import JobError
from tests.worker.fake import FakeChatCodec, FakeEngine, FakeTokenizer, finish

CODEC = FakeChatCodec(FakeTokenizer())  # one token per byte, 257 is BOS
BOS = 257


def score(prompt: str | list[int], completion: str | list[int], **options: object) -> wire.Score:
    item = wire.ScoreItem(prompt=prompt, completion=completion)
    return wire.Score(model="demo", items=[item], **options)  # type: ignore[arg-type]


def generate(**options: object) -> wire.Generate:
    return wire.Generate(model="demo", **options)  # type: ignore[arg-type]


def translate(request: wire.Request) -> list[PreparedSequence]:
    return finish(to_sequences(request, CODEC, FakeEngine.model_info.context_length))


@pytest.mark.parametrize(("prompt", "completions"), [("ab ", ["c", "de"]), ([1, 2], [[3], [4, 5]])])
def test_items_that_share_a_prompt_are_scored_as_if_each_had_it(prompt: Any, completions: list[Any]):
    shared = wire.Score(
        model="demo", prompt=prompt, items=[wire.ScoreItem(completion=completion) for completion in completions]
    )
    repeated = [translate(score(prompt, completion))[0] for completion in completions]

    for one, other in zip(translate(shared), repeated, strict=True):
        assert one.sequence.token_ids == other.sequence.token_ids
        assert one.sequence.score_from == other.sequence.score_from == one.num_prompt_tokens
        assert (one.is_prompt_text, one.bos_added) == (other.is_prompt_text, other.bos_added)


def test_prompt_and_completion_are_encoded_jointly_and_scored_from_the_completion():
    request = score("ab ", "c", top_logprobs=3, temperature=0.5, rank=True, entropy=True)

    (each,) = translate(request)

    sequence = each.sequence
    assert sequence.token_ids == [BOS, *b"ab", *b" c"]  # the prompt's trailing space moved
    assert (sequence.score_from, each.num_prompt_tokens, each.bos_added) == (3, 3, True)
    assert (sequence.top_logprobs, sequence.temperature, sequence.rank, sequence.entropy) == (3, 0.5, True, True)
    assert sequence.sampling is None


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (score("a", "b" * 9, top_logprobs=10), None),
        (score("a", "b" * 11, top_logprobs=10), "top_logprobs"),
        (score("a" * 9, "b", top_logprobs=10, score="all"), "top_logprobs"),  # and BOS
        (score("a", "b" * 10, targets=[5] * 10), None),
        (score("a", "b" * 11, targets=[5] * 10), "targets"),
        (generate(prompt="a", n=4, max_tokens=3, targets=[5] * 10), "targets"),
        (score("a", "b" * 101), "items"),
        (generate(prompt="a", n=5, max_tokens=2, top_logprobs=10), None),
        (generate(prompt="a", n=4, max_tokens=3, top_logprobs=10), "top_logprobs"),
        (generate(prompt="a" * 24, n=4, max_tokens=1, prompt_logprobs=True), "n"),
    ],
)
def test_the_tokens_of_texts_are_counted_for_the_bound_of_a_result(
    request_: wire.Request, field: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wire.request, "MAX_TOP_LOGPROBS", 100)
    monkeypatch.setattr(wire.request, "MAX_TARGET_LOGPROBS", 100)
    monkeypatch.setattr(wire.request, "MAX_REPORTED_TOKENS", 100)
    if field is None:
        translate(request_)
        return
    with pytest.raises(JobError) as caught:
        translate(request_)
    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", field)


def test_token_ids_pass_unchanged():
    (each,) = translate(score([5, 6], [7]))

    assert each.sequence.token_ids == [5, 6, 7]
    assert (each.sequence.score_from, each.num_prompt_tokens, each.bos_added) == (2, 2, False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (1.0, False)),
        ({"logprobs_mode": "raw_logprobs"}, (1.0, False)),
        ({"logprobs_mode": "processed_logprobs"}, (0.5, True)),
        ({"logprobs_mode": "processed_logprobs", "logprobs": False}, (1.0, False)),
    ],
)
def test_processed_logprobs_are_at_the_temperature(options: dict[str, Any], expected: tuple[float, bool]):
    (each,) = translate(generate(prompt="a", temperature=0.5, **options))

    assert (each.sequence.temperature, each.sequence.processed) == expected
    recomputed = each.with_recompute().recomputed
    assert recomputed is not None
    assert recomputed.temperature == expected[0]


def test_targets_of_all_items_of_one_item_and_of_each_token():
    items = [
        wire.ScoreItem(prompt=[5], completion=[7, 8]),
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[4]),
        wire.ScoreItem(prompt=[5], completion=[7, 8], targets=[[], [1, 2]]),
    ]
    assert [each.sequence.targets for each in translate(wire.Score(model="demo", items=items))] == [
        None,
        Targets([[4]], is_shared=True),
        Targets([[], [1, 2]], is_shared=False),
    ]
    (shared,) = translate(wire.Score(model="demo", items=items[:1], targets=[9, 3]))
    assert shared.sequence.targets == Targets([[9, 3]], is_shared=True)
    (generated,) = translate(generate(prompt="a", targets=[9, 3]))
    assert generated.sequence.targets == Targets([[9, 3]], is_shared=True)


def test_n_completions_are_n_sequences_with_their_own_seeds():
    request = generate(
        prompt="a", n=3, seed=7, stop=["é"], max_tokens=5, temperature=0.0, top_k=4, top_p=0.5, min_p=0.1
    )

    sequences = [each.sequence for each in translate(request)]

    assert [sequence.sampling.seed for sequence in sequences if sequence.sampling] == [7, 8, 9]
    first = sequences[0].sampling
    assert first is not None
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p, first.min_p) == (5, 0.0, 4, 0.5, 0.1)
    assert first.stop == ("é".encode(),)
    assert sequences[0].token_ids == [BOS, 97]
    assert sequences[0].token_ids is not sequences[1].token_ids
    assert sequences[0].score_from is None


def test_without_a_seed_every_sequence_draws_its_own():
    samplings = [each.sequence.sampling for each in translate(generate(prompt="a", n=2))]

    assert [sampling.seed for sampling in samplings if sampling] == [None, None]


def test_a_chat_is_encoded_by_the_template():
    request = generate(messages=[wire.Message(role="user", content="hi")])

    (each,) = translate(request)

    assert each.sequence.token_ids == [BOS, *b"user: hi"]
    assert each.bos_added


def test_a_chat_whose_first_tokens_are_cut_off_has_no_bos():
    messages = [wire.Message(role="user", content="hi")]

    (cut,) = translate(generate(messages=messages, truncate="left", truncate_to=4))
    (whole,) = translate(generate(messages=messages, truncate="left", truncate_to=40))

    assert (cut.sequence.token_ids, cut.bos_added) == ([*b": hi"], False)
    assert (whole.sequence.token_ids, whole.bos_added) == ([BOS, *b"user: hi"], True)


GO = [wire.Message(role="user", content="Go.")]


class RecordingTemplate:
    """A template that records what it would render."""

    def __init__(self) -> None:
        self.rendered: list[Any] = []

    def accepts_variable(self, name: str) -> bool:
        return name == "enable_thinking"

    def render(
        self, messages: list[dict[str, object]], tools: object = (), variables: object = None
    ) -> tuple[str, str]:
        self.rendered += [messages, tools, variables]
        return "x", "x"


class RecordingCodec(FakeChatCodec):
    def __init__(self, can_call: bool = True) -> None:
        super().__init__(FakeTokenizer())
        self.template = RecordingTemplate()
        self.rendered = self.template.rendered
        self.can_call = can_call

    def tools_unsupported_reason(self, may_call: bool = True) -> str | None:
        return "the format of its calls is not known" if may_call and not self.can_call else None


def test_messages_tools_and_calls_as_the_template_gets_them():
    call = wire.ToolCall(id="c", name="look", arguments={"place": "here"})
    messages = [
        wire.Message(role="user", content="Go."),
        wire.Message(role="assistant", content="", reasoning_content="Hm.", tool_calls=[call]),
        wire.Message(role="tool", content="It is.", tool_call_id="c"),
    ]
    codec = RecordingCodec()

    finish(to_sequences(generate(messages=messages, tools=[wire.Tool(name="look")]), codec, 100))

    rendered, tools, _ = codec.rendered
    assert rendered[1]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    ]
    assert (rendered[1]["reasoning_content"], rendered[1]["thinking"]) == ("Hm.", "Hm.")
    assert rendered[2] == {"role": "tool", "content": "It is.", "tool_call_id": "c", "name": "look"}
    function = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tools == [{"type": "function", "function": function}]


def test_a_model_that_cannot_call_functions_refuses_tools():
    codec = RecordingCodec(can_call=False)

    with pytest.raises(JobError) as caught:
        finish(to_sequences(generate(messages=GO, tools=[wire.Tool(name="look")]), codec, 100))

    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", "tools")


def test_tools_that_must_not_be_called_are_rendered_and_need_no_known_format():
    """TRL sends such requests and parses the calls itself."""
    request = generate(messages=GO, tools=[wire.Tool(name="look")], tool_choice="none")
    codec = RecordingCodec(can_call=False)

    (each,) = finish(to_sequences(request, codec, 100))

    assert [tool["function"]["name"] for tool in codec.rendered[1]] == ["look"]
    assert each.chat_prompt is not None
    assert each.chat_prompt.tools == []


def test_variables_that_the_template_does_not_read_are_refused():
    codec = RecordingCodec()
    finish(to_sequences(generate(messages=GO, chat_template_kwargs={"enable_thinking": False}), codec, 100))
    assert codec.rendered[2] == {"enable_thinking": False}

    with pytest.raises(JobError) as caught:
        finish(to_sequences(generate(messages=GO, chat_template_kwargs={"enabel_thinking": False}), codec, 100))
    failure = caught.value.failure
    assert (failure.code, failure.field) == ("invalid", "chat_template_kwargs.enabel_thinking")


def test_penalties_and_biases_reach_the_sequence():
    options = {
        "logit_bias": {98: -100.0},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
    }
    (each,) = translate(generate(prompt="a", **options))

    sampling = each.sequence.sampling
    assert sampling is not None
    assert {name: getattr(sampling, name) for name in options} == options | {"logit_bias": ((98, -100.0),)}


def test_stop_conditions_reach_the_sequences():
    options = {"stop_token_ids": [98, 99], "ignore_eos": True, "min_tokens": 3}

    prepared = translate(generate(prompt="a", n=2, include_stop_str_in_output=True, **options))

    for each in prepared:
        sampling = each.sequence.sampling
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ((98, 99), True, 3)
        assert sampling.include_stop


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": None, "min_tokens": 99}, "min_tokens"),  # the context is 100, the prompt takes 2
        ({"min_tokens": 1, "stop_token_ids": list(range(256))}, None),
        ({"min_tokens": 1, "stop_token_ids": list(range(258))}, "stop_token_ids"),
        ({"stop_token_ids": list(range(258))}, None),
    ],
)
def test_min_tokens_that_cannot_be_generated_are_refused(options: dict[str, Any], field: str | None):
    def translate_for_context_of_100() -> list[PreparedSequence]:
        return finish(to_sequences(generate(prompt="a", **options), CODEC, 100))

    if field is None:
        assert translate_for_context_of_100()
        return
    with pytest.raises(JobError) as caught:
        translate_for_context_of_100()
    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", field)
    assert caught.value.failure.message.startswith(f"{field}: ")


def test_min_tokens_raise_the_default_of_max_tokens():
    (each,) = finish(to_sequences(generate(prompt="a", max_tokens=None, min_tokens=5000), CODEC, 9000))

    assert each.sequence.sampling.max_tokens == 5000


def test_a_job_without_a_seed_derives_one_from_its_id():
    request = generate(prompt="a")

    assert with_seed(request, "j") == with_seed(request, "j")
    assert with_seed(request, "j") != with_seed(request, "k")
    assert with_seed(generate(prompt="a", seed=7), "j").seed == 7
    assert with_seed(score("a", "b"), "j") == score("a", "b")


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (score("a", LONG), r"items\[0\]"),
        (score(LONG, "a"), r"items\[0\]"),
        (score(LONG[:50_000], LONG[:50_000]), r"items\[0\]"),
        (generate(prompt=LONG), "prompt"),
        (generate(messages=[wire.Message(role="user", content=LONG)]), "rendered chat"),
        (wire.Tokenize(model="demo", prompt="x" * 3_000_000), "prompt"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_by_its_beginning(request_: wire.Request, what: str):
    lengths: list[int] = []

    class CountingTokenizer(FakeTokenizer):
        def encode(self, text: str, add_bos: bool = True) -> tuple[list[int], bool]:
            lengths.append(len(text))
            return super().encode(text, add_bos)

    with pytest.raises(ContextLengthExceeded, match=rf"^(the )?{what} has .* characters, of which the first"):
        finish(to_sequences(request_, FakeChatCodec(CountingTokenizer()), 4096))
    limit = 500_000 if isinstance(request_, wire.Tokenize) else 4096
    assert sum(lengths) <= 2 * (limit + 1025)


def test_the_first_item_that_does_not_fit_ends_the_job():
    items = [wire.ScoreItem(prompt="x" * 4096, completion="x")] * 200
    steps = to_sequences(wire.Score(model="demo", items=items), CODEC, 4096)

    assert next(steps) > 8192
    with pytest.raises(ContextLengthExceeded, match=r"items\[0\] has 4098 tokens; at most 4096 fit"):
        next(steps)


def test_what_just_fits_is_not_refused():
    (each,) = finish(to_sequences(score("x" * 4094, "x"), CODEC, 4096))
    assert len(each.sequence.token_ids) == 4096
    tokenized = wire.Tokenize(model="demo", prompt="x" * 20_000)  # longer than the context: the model does not run
    (each,) = finish(to_sequences(tokenized, CODEC, 4096))
    assert each.num_prompt_tokens == 20_001


def test_each_step_announces_what_it_encodes():
    items = [wire.ScoreItem(prompt="x" * 10, completion="x"), wire.ScoreItem(prompt=[1], completion=[2])]

    assert list(to_sequences(wire.Score(model="demo", items=items), CODEC, 4096)) == [21]
    assert list(to_sequences(generate(prompt="abc"), CODEC, 4096)) == [3]
    rendering, encoding = to_sequences(generate(messages=GO * 1000), CODEC, 40960)
    assert rendering >= 1_000_000  # a template may look at all messages for each of them
    assert encoding == 1000 * len("user: Go.\n") - 1
