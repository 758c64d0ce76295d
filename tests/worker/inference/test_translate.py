"""Requests become rows, and rows results, without a number moved, dropped or made up."""

import math
from typing import Any

import msgspec
import pytest

from scorepool import wire
from scorepool.engine.text.chat.chat_format import ChatFormat
from scorepool.worker.inference.infer import stamp_of
from scorepool.worker.inference.result import to_result
from scorepool.worker.inference.translate import Translated, to_rows, with_seed
from scorepool.worker.rq.errors import JobError
from tests.worker.fake import FakeEngine, FakeTokenizer

TOKENIZER = FakeTokenizer()  # one token a byte, 257 is BOS
BOS = 257
STAMP = stamp_of("demo", FakeEngine.model_info)


def score(prompt: str | list[int], completion: str | list[int], **asked: object) -> wire.Score:
    item = wire.ScoreItem(prompt=prompt, completion=completion)
    return wire.Score(model="demo", items=[item], **asked)  # type: ignore[arg-type]


def generate(**asked: object) -> wire.Generate:
    return wire.Generate(model="demo", **asked)  # type: ignore[arg-type]


def translate(request: wire.Request) -> list[Translated]:
    return to_rows(request, TOKENIZER, FakeEngine.model_info.context_length)


def scored(request: wire.Request, rows: list[Translated]) -> wire.SequenceResult:
    (only,) = to_result(request, rows, TOKENIZER, STAMP).sequences
    return only


def test_a_score_item_of_text_is_encoded_jointly_and_scored_from_its_completion():
    request = score("ab ", "c", top_logprobs=3, temperature=0.5, rank=True, entropy=True)

    (translated,) = translate(request)

    row = translated.row
    assert row.token_ids == [BOS, *b"ab", *b" c"]  # the prompt's trailing space moved
    assert (row.score_from, translated.num_prompt_tokens, translated.bos_added) == (3, 3, True)
    assert (row.top_logprobs, row.temperature, row.rank, row.entropy) == (3, 0.5, True, True)
    assert row.sampling is None


def test_token_ids_pass_untouched():
    (translated,) = translate(score([5, 6], [7]))

    assert translated.row.token_ids == [5, 6, 7]
    assert (translated.row.score_from, translated.num_prompt_tokens, translated.bos_added) == (2, 2, False)


def test_a_result_of_a_score_job_says_what_was_used_and_found():
    request = score("a", "bc", top_logprobs=2, rank=True, entropy=True)
    rows = translate(request)
    row = rows[0].row
    row.columns.logprobs, row.columns.ranks, row.columns.entropies = [-0.5, -1.25], [1, 2], [0.5, 1.0]
    row.columns.top_ids, row.columns.top_logprobs = [[98, 1], [1, 99]], [[-0.5, -2.0], [-1.0, -1.25]]

    result = to_result(request, rows, TOKENIZER, STAMP)

    found = result.sequences[0]
    assert found.token_ids == list(b"bc")
    assert b"".join(found.token_bytes) == b"bc"
    assert found.text == "bc"
    assert found.logprobs is not None
    assert found.logprobs.values() == [-0.5, -1.25]
    assert found.top_ids == [[98, 1], [1, 99]]
    assert found.top_bytes == [[b"b", b"\x01"], [b"\x01", b"c"]]
    assert found.top_logprobs is not None
    assert [column.values() for column in found.top_logprobs] == [[-0.5, -2.0], [-1.0, -1.25]]
    assert (found.ranks, found.logprob_sum, found.is_greedy) == ([1, 2], -1.75, False)
    assert (found.prompt_token_ids, found.num_prompt_tokens, found.bos_added) == ([BOS, 97], 2, True)
    assert found.num_reported_prompt_tokens == 0
    assert result.usage == wire.Usage(prompt_tokens=2, completion_tokens=2)
    assert result.temperature == 1.0
    assert result.stamp == STAMP
    assert result.stamp.versions.keys() == {"scorepool", "mlx", "mlx-lm"}


def test_score_all_reports_the_prompt_and_null_for_the_first_token():
    request = score("a", "b", score="all", top_logprobs=1)
    rows = translate(request)
    row = rows[0].row
    row.columns.logprobs = [None, -1.0, -0.25]
    row.columns.top_ids, row.columns.top_logprobs = [[], [97], [98]], [[], [-1.0], [-0.25]]

    found = scored(request, rows)

    assert row.score_from == 0
    assert found.token_ids == [BOS, *b"ab"]
    assert found.logprobs is not None
    assert found.logprobs.values() == [None, -1.0, -0.25]
    assert found.top_ids == [[], [97], [98]]
    assert found.num_reported_prompt_tokens == 2
    assert found.logprob_sum == -0.25  # the completion's alone
    assert found.is_greedy is True


def test_a_completion_whose_first_token_has_no_predictor_has_no_sum():
    request = score([7], [8], score="all", rank=True)
    rows = translate(request)
    rows[0].row.columns.logprobs, rows[0].row.columns.ranks = [None, -1.0], [None, 1]
    assert scored(request, rows).logprob_sum == -1.0

    alone = Translated(rows[0].row, num_prompt_tokens=0, is_prompt_text=True, bos_added=False)
    found = scored(request, [alone])

    assert found.logprob_sum is None
    assert found.is_greedy is None


def test_minus_infinity_is_clamped_and_counted():
    request = score([1], [2, 3], top_logprobs=1)
    rows = translate(request)
    row = rows[0].row
    row.columns.logprobs, row.columns.top_ids, row.columns.top_logprobs = (
        [-math.inf, -1.0],
        [[9], [9]],
        [[-0.5], [-math.inf]],
    )

    found = scored(request, rows)

    assert found.logprobs is not None
    assert found.logprobs.values() == [-9999.0, -1.0]
    assert found.clamped == 2
    assert found.logprob_sum == -10000.0
    assert b"-9999" in wire.encode_json(found)


@pytest.mark.parametrize("column", ["logprobs", "top_logprobs", "sampled_logprobs"])
def test_nan_is_a_failure_and_never_a_number(column: str):
    request = generate(prompt=[1], top_logprobs=1, top_p=0.5)
    rows = translate(request)
    row = rows[0].row
    row.token_ids += [2]
    row.columns.logprobs, row.columns.top_ids, row.columns.top_logprobs, row.columns.sampled_logprobs = (
        [-1.0],
        [[2]],
        [[-1.0]],
        [-1.0],
    )
    setattr(row.columns, column, [[math.nan]] if column == "top_logprobs" else [math.nan])

    with pytest.raises(JobError) as raised:
        to_result(request, rows, TOKENIZER, STAMP)

    assert raised.value.failure.code == "numeric"


def test_columns_of_different_lengths_are_refused_rather_than_paired():
    request = score([1], [2, 3])
    rows = translate(request)
    rows[0].row.columns.logprobs = [-1.0]

    with pytest.raises(ValueError, match="zip"):
        to_result(request, rows, TOKENIZER, STAMP)


def test_n_completions_are_n_rows_with_seeds_of_their_own():
    request = generate(
        prompt="a", n=3, seed=7, stop=["é"], max_tokens=5, temperature=0.0, top_k=4, top_p=0.5, min_p=0.1
    )

    rows = [translated.row for translated in translate(request)]

    assert [row.sampling.seed for row in rows if row.sampling] == [7, 8, 9]
    first = rows[0].sampling
    assert first is not None
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p, first.min_p) == (5, 0.0, 4, 0.5, 0.1)
    assert first.stop == ("é".encode(),)
    assert rows[0].token_ids == [BOS, 97]
    assert rows[0].token_ids is not rows[1].token_ids
    assert rows[0].score_from is None


def test_without_a_seed_every_row_draws_its_own():
    assert [row.row.sampling.seed for row in translate(generate(prompt="a", n=2)) if row.row.sampling] == [None, None]


def test_a_chat_is_encoded_by_the_template():
    request = generate(messages=[wire.Message(role="user", content="hi")])

    (translated,) = translate(request)

    assert translated.row.token_ids == [BOS, *b"user: hi"]
    assert translated.bos_added


GO = [wire.Message(role="user", content="Go.")]


class WithTools(FakeTokenizer):
    """Its template is the messages and the tools themselves."""

    def __init__(self, can_call: bool = True) -> None:
        self.seen: list[Any] = []
        self.can_call = can_call

    def why_no_tools(self, may_call: bool = True) -> str | None:
        return "it writes calls in no known format" if may_call and not self.can_call else None

    def knows_variable(self, name: str) -> bool:
        return name == "enable_thinking"

    def encode_chat(
        self, messages: list[dict[str, object]], tools: object = (), variables: object = None
    ) -> tuple[list[int], list[int]]:
        self.seen += [messages, tools, variables]
        return [1], [1]


def test_what_a_template_is_shown_of_tools_and_calls():
    call = wire.ToolCall(id="c", name="look", arguments={"place": "here"})
    messages = [
        wire.Message(role="user", content="Go."),
        wire.Message(role="assistant", content="", reasoning_content="Hm.", tool_calls=[call]),
        wire.Message(role="tool", content="It is.", tool_call_id="c"),
    ]
    tokenizer = WithTools()

    to_rows(generate(messages=messages, tools=[wire.Tool(name="look")]), tokenizer, 100)

    shown, tools, _ = tokenizer.seen
    assert shown[1]["tool_calls"] == [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": {"place": "here"}}}
    ]
    assert (shown[1]["reasoning_content"], shown[1]["thinking"]) == ("Hm.", "Hm.")
    assert shown[2] == {"role": "tool", "content": "It is.", "tool_call_id": "c", "name": "look"}
    function = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert tools == [{"type": "function", "function": function}]


def test_a_model_that_calls_no_functions_refuses_tools_by_name():
    class Without(FakeTokenizer):
        def why_no_tools(self, may_call: bool = True) -> str | None:
            return "its template has no place for them"

    with pytest.raises(JobError) as caught:
        to_rows(generate(messages=GO, tools=[wire.Tool(name="look")]), Without(), 100)

    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", "tools")


def test_tools_that_are_not_to_be_called_are_shown_and_need_no_known_format():
    """TRL asks in this way, and reads the calls itself."""
    request = generate(messages=GO, tools=[wire.Tool(name="look")], tool_choice="none")
    tokenizer = WithTools(can_call=False)

    (translated,) = to_rows(request, tokenizer, 100)

    assert [tool["function"]["name"] for tool in tokenizer.seen[1]] == ["look"]
    assert translated.chat is not None
    assert translated.chat.tools == []


def test_variables_of_the_template_are_those_that_it_knows():
    tokenizer = WithTools()
    to_rows(generate(messages=GO, chat_template_kwargs={"enable_thinking": False}), tokenizer, 100)
    assert tokenizer.seen[2] == {"enable_thinking": False}

    with pytest.raises(JobError) as caught:
        to_rows(generate(messages=GO, chat_template_kwargs={"enabel_thinking": False}), tokenizer, 100)
    failure = caught.value.failure
    assert (failure.code, failure.field) == ("invalid", "chat_template_kwargs.enabel_thinking")


def test_a_generated_result_reports_only_what_was_generated():
    request = generate(prompt="ab", n=2, top_logprobs=1, temperature=0.7)
    rows = translate(request)
    for translated in rows:
        row = translated.row
        row.token_ids += list("né".encode())
        row.columns.logprobs, row.columns.sampled_logprobs = [-1.0, -2.0, -3.0], [-0.5, -1.0, -1.5]
        row.columns.top_ids, row.columns.top_logprobs = [[1]] * 3, [[-0.1]] * 3
        row.finish_reason = "length"
    rows[0].row.text_bytes = b"n"  # cut before a stop string

    result = to_result(request, rows, TOKENIZER, STAMP)

    cut, whole = result.sequences
    assert (cut.text, whole.text) == ("n", "né")
    assert whole.token_ids == list("né".encode())
    assert whole.sampled_logprobs is not None
    assert whole.sampled_logprobs.values() == [-0.5, -1.0, -1.5]
    assert whole.prompt_token_ids == [BOS, *b"ab"]
    assert (whole.finish_reason, whole.is_greedy, whole.logprob_sum) == ("length", False, -6.0)
    assert result.usage == wire.Usage(prompt_tokens=3, completion_tokens=6)
    assert result.temperature == 0.7


def test_the_sampled_logprobs_of_the_models_own_distribution_are_not_said_twice():
    request = generate(prompt="a")
    rows = translate(request)
    row = rows[0].row
    row.token_ids += [98]
    row.columns.logprobs, row.columns.sampled_logprobs = [-1.0], [-1.0000001]

    assert scored(request, rows).sampled_logprobs is None


def test_generation_without_logprobs_reports_none():
    request = generate(prompt="a", logprobs=False)
    rows = translate(request)
    rows[0].row.token_ids += [98]

    found = scored(request, rows)

    assert found.logprobs is None
    assert found.token_ids == [98]


def test_a_result_survives_the_way_through_redis():
    request = score("a", "b", top_logprobs=1)
    rows = translate(request)
    row = rows[0].row
    row.columns.logprobs, row.columns.top_ids, row.columns.top_logprobs = [-0.1], [[98]], [[-0.1]]
    result = to_result(request, rows, TOKENIZER, STAMP)

    assert wire.decode_outcome(wire.encode(result)) == result
    assert msgspec.json.decode(wire.encode_json(result))["sequences"][0]["top_ids"] == [[98]]


@pytest.mark.parametrize(("token_id", "rank"), [(2, 1), (3, 2)])
def test_of_two_equally_likely_tokens_the_smaller_id_is_greedy_whatever_was_asked(token_id: int, rank: int):
    """As the argmax of lm-evaluation-harness; is_greedy must not depend on the flags."""
    request = score([1], [token_id], top_logprobs=2)
    rows = translate(request)
    row = rows[0].row
    row.columns.logprobs, row.columns.top_ids, row.columns.top_logprobs = [-0.75], [[2, 3]], [[-0.75, -0.75]]
    ranked = score([1], [token_id], rank=True)
    ranked_rows = translate(ranked)
    ranked_rows[0].row.columns.logprobs, ranked_rows[0].row.columns.ranks = [-0.75], [rank]

    assert scored(request, rows).is_greedy is (rank == 1)
    assert scored(ranked, ranked_rows).is_greedy is (rank == 1)


def test_a_generate_job_reports_its_prompts_tokens_when_asked():
    request = generate(prompt="ab", max_tokens=1, prompt_logprobs=True, top_logprobs=1, rank=True)
    rows = translate(request)
    row = rows[0].row
    assert (row.score_from, row.top_logprobs, row.rank) == (0, 1, True)
    row.columns.logprobs, row.columns.ranks = [None, -1.0, -2.0, -3.0], [None, 1, 2, 3]
    row.columns.top_ids, row.columns.top_logprobs = [[], [97], [1], [1]], [[], [-1.0], [-0.5], [-0.5]]
    row.token_ids.append(ord("c"))
    row.text_bytes, row.finish_reason = b"c", "length"

    found = scored(request, rows)

    assert found.token_ids == [BOS, *b"abc"]
    assert (found.num_prompt_tokens, found.num_reported_prompt_tokens) == (3, 3)
    assert found.text == "abc"
    assert found.logprobs is not None
    assert found.logprobs.values() == [None, -1.0, -2.0, -3.0]
    assert (found.logprob_sum, found.is_greedy) == (-3.0, False)


def test_a_generate_job_of_no_tokens_only_scores_its_prompt():
    request = generate(prompt="ab", max_tokens=0, prompt_logprobs=True, add_bos=False)
    rows = translate(request)
    row = rows[0].row
    assert (row.sampling, row.score_from, row.token_ids) == (None, 0, [*b"ab"])
    row.columns.logprobs = [None, -1.0]

    found = scored(request, rows)

    assert (found.token_ids, found.text, found.finish_reason) == ([*b"ab"], "ab", None)


def test_penalties_and_biases_reach_the_row():
    asked = {
        "logit_bias": {98: -100.0},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
    }
    (translated,) = translate(generate(prompt="a", **asked))

    sampling = translated.row.sampling
    assert sampling is not None
    assert {name: getattr(sampling, name) for name in asked} == asked | {"logit_bias": ((98, -100.0),)}


def test_a_biased_row_reports_the_distribution_that_it_sampled_from():
    request = generate(prompt="a", logit_bias={98: -100.0}, max_tokens=1)
    rows = translate(request)
    rows[0].row.token_ids.append(ord("c"))
    rows[0].row.columns.logprobs, rows[0].row.columns.sampled_logprobs = [-3.0], [-0.5]

    found = scored(request, rows)

    assert found.sampled_logprobs is not None
    assert found.sampled_logprobs.values() == [-0.5]


def test_what_ends_a_generation_reaches_its_rows():
    asked = {"stop_token_ids": [98, 99], "ignore_eos": True, "min_tokens": 3}

    rows = translate(generate(prompt="a", n=2, include_stop_str_in_output=True, **asked))

    for translated in rows:
        sampling = translated.row.sampling
        assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.min_tokens) == ((98, 99), True, 3)
        assert sampling.include_stop


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"max_tokens": None, "min_tokens": 99}, "min_tokens"),  # the context of 100 has the prompt's two
        ({"min_tokens": 1, "stop_token_ids": list(range(256))}, None),
        ({"min_tokens": 1, "stop_token_ids": list(range(258))}, "stop_token_ids"),
        ({"stop_token_ids": list(range(258))}, None),
    ],
)
def test_min_tokens_that_cannot_be_had_are_refused(asked: dict[str, Any], field: str | None):
    def to_100() -> list[Translated]:
        return to_rows(generate(prompt="a", **asked), TOKENIZER, 100)

    if field is None:
        assert to_100()
        return
    with pytest.raises(JobError) as caught:
        to_100()
    assert (caught.value.failure.code, caught.value.failure.field) == ("invalid", field)
    assert caught.value.failure.message.startswith(f"{field}: ")


def test_as_many_tokens_are_had_as_are_asked_for_at_least():
    (translated,) = to_rows(generate(prompt="a", max_tokens=None, min_tokens=5000), TOKENIZER, 9000)

    assert translated.row.sampling.max_tokens == 5000


def test_a_row_that_must_not_end_reports_the_distribution_that_it_sampled_from():
    request = generate(prompt="a", min_tokens=1, max_tokens=1)
    rows = translate(request)
    rows[0].row.token_ids.append(ord("c"))
    rows[0].row.columns.logprobs, rows[0].row.columns.sampled_logprobs = [-3.0], [-0.5]

    assert scored(request, rows).sampled_logprobs.values() == [-0.5]


class WithSpecial(FakeTokenizer):
    markup = ChatFormat(moves={}, silent_ids=frozenset({ord("<"), 256}), eos_ids=FakeTokenizer.eos_ids)


@pytest.mark.parametrize(
    ("generated", "text_bytes", "skip", "text", "skipped"),
    [
        (b"a<b<", b"a<b<", True, "ab", [1, 3]),
        (b"a<b<", b"a<b<", False, "a<b<", []),
        (b"<abc", b"<ab", True, "ab", [0]),  # a stop string begins behind it
        (b"<<", b"<", True, "", [0, 1]),
        (b"<\xc3<\xa9", b"<\xc3<\xa9", True, "é", [0, 2]),
    ],
)
def test_special_tokens_are_in_the_text_or_are_not(
    generated: bytes, text_bytes: bytes, skip: bool, text: str, skipped: list[int]
):
    """Those of the prompt are, for it is reported as it is."""
    request = generate(prompt="<p", skip_special_tokens=skip, prompt_logprobs=True)
    tokenizer = WithSpecial()
    rows = to_rows(request, tokenizer, 100)
    row = rows[0].row
    row.token_ids += generated
    row.columns.logprobs = [None, *[-1.0] * (len(row.token_ids) - 1)]
    row.text_bytes, row.finish_reason, row.stop_reason = text_bytes, "stop", b"lo"

    (found,) = to_result(request, rows, tokenizer, STAMP).sequences

    assert (found.text, found.skipped, found.stop_reason) == ("<p" + text, skipped, "lo")
    assert found.token_bytes[3:] == [bytes([byte]) for byte in generated]


def test_a_job_without_a_seed_has_its_own_and_keeps_it():
    request = generate(prompt="a")

    assert with_seed(request, "j") == with_seed(request, "j")
    assert with_seed(request, "j") != with_seed(request, "k")
    assert with_seed(generate(prompt="a", seed=7), "j").seed == 7
    assert with_seed(score("a", "b"), "j") == score("a", "b")


@pytest.mark.parametrize(("max_tokens", "score_from"), [(5, None), (0, 2)])
def test_a_prompt_that_is_reported_without_logprobs_is_not_scored(max_tokens: int, score_from: int | None):
    request = generate(prompt="ab", max_tokens=max_tokens, prompt_logprobs=True, logprobs=False)
    (translated,) = rows = translate(request)
    row = translated.row
    if max_tokens:
        row.token_ids.append(ord("c"))
        row.columns.logprobs, row.text_bytes, row.finish_reason = [-0.5], b"c", "length"
    else:
        row.columns.logprobs = [-0.5]

    result = scored(request, rows)

    assert row.score_from == score_from
    assert result.token_ids == [BOS, *b"ab", *(b"c" if max_tokens else b"")]
    assert (result.num_reported_prompt_tokens, result.logprobs) == (3, None)
    assert result.text == ("abc" if max_tokens else "ab")
