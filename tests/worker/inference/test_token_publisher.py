"""Tokens of a job that streams are told once, in order, and never one that a stop string may take back."""

import threading
from pathlib import Path

import pytest
from redis import Redis

from scorepool import store, wire
from scorepool.engine import Sampling
from scorepool.engine import Sequence as Row
from scorepool.engine.sampling.stop import check_stop
from scorepool.local.redis_server import RedisServer
from scorepool.worker.inference.token_publisher import JobStream, TokenPublisher, begun_stop
from scorepool.worker.inference.translate import Translated
from tests.worker.conftest import Workers, submit, until
from tests.worker.fake import FakeTokenizer

TOKENIZER = FakeTokenizer()


def row_of(*stops: bytes, prompt: bytes = b"p") -> Row:
    return Row(token_ids=list(prompt), score_from=0, top_logprobs=1, sampling=Sampling(max_tokens=50, stop=stops))


def step(grower: JobStream, row: Row, token: bytes) -> list[wire.TokenDelta]:
    """One token of the engine's."""
    row.token_ids += token
    row.columns.logprobs += [-float(len(row.token_ids))] * len(token)
    row.columns.top_ids += [[1]] * len(token)
    row.columns.top_logprobs += [[-0.5]] * len(token)
    check_stop(row, TOKENIZER.token_bytes, TOKENIZER.eos_ids)
    return [growth() for growth in grower.on_step([row])]


def started(row: Row, with_logprobs: bool = True) -> JobStream:
    row.append_unpredicted()
    return JobStream("j", [Translated(row, row.num_input_tokens, False, False)], with_logprobs, TOKENIZER)


def test_each_step_tells_its_token_with_its_numbers():
    row = row_of()
    grower = started(row)

    (first,), (second,) = step(grower, row, b"a"), step(grower, row, b"b")

    assert (first.id, first.sequence, first.first, first.token_ids) == ("j", 0, 0, [97])
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (row.num_input_tokens, None)
    assert (second.first, second.token_bytes) == (1, [b"b"])
    assert first.logprobs.values() == [-2.0]  # the prompt's entry comes before and is not told
    assert (second.top_ids, second.top_bytes, second.top_logprobs[0].values()) == ([[1]], [[b"\x01"]], [-0.5])


def test_without_logprobs_none_are_told():
    row = row_of()

    (growth,) = step(started(row, with_logprobs=False), row, b"a")

    assert growth.logprobs is None
    assert growth.top_ids is None


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not():
    row = row_of(b"xyz", b"yq")
    grower = started(row)

    assert [g.token_bytes for g in step(grower, row, b"a")] == [[b"a"]]
    assert step(grower, row, b"x") == []
    assert step(grower, row, b"y") == []
    (released,) = step(grower, row, b"b")
    assert (released.first, released.token_bytes) == (1, [b"x", b"y", b"b"])
    assert step(grower, row, b"y") == []
    assert step(grower, row, b"q") == []  # the stop string: nothing of it was told
    assert row.finish_reason == "stop"


def test_what_is_skipped_is_told_with_its_tokens():
    row = row_of(b"bc")
    row.append_unpredicted()
    grower = JobStream("j", [Translated(row, 1, False, False, skipped_ids=frozenset(b"<"))], True, TOKENIZER)

    growths = [growth for token in (b"<", b"a", b"b", b"<", b"a") for growth in step(grower, row, token)]

    assert [(growth.first, growth.token_bytes, growth.skipped) for growth in growths] == [
        (0, [b"<"], [0]),
        (1, [b"a"], []),
        (2, [b"b", b"<"], [3]),  # "b" was held back
        (4, [b"a"], []),
    ]


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [
        (b"ab", (b"bc",), 1),
        (b"ab", (b"abc", b"bx"), 2),
        (b"ab", (b"b",), 0),
        (b"", (b"a",), 0),
        (b"aab", (b"aabx",), 3),
    ],
)
def test_how_much_may_begin_a_stop_string(text: bytes, stops: tuple[bytes, ...], held: int):
    row = row_of(*stops)
    row.text += text

    assert begun_stop(row) == held


def test_what_came_since_the_last_message_is_one_message(redis: Redis):
    outlet = TokenPublisher(redis)
    growth = wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])
    is_writing, may_go_on = threading.Event(), threading.Event()

    def slow() -> wire.TokenDelta:
        is_writing.set()
        assert may_go_on.wait(60)
        return growth

    outlet.put([slow])
    assert is_writing.wait(60)
    for _ in range(5):
        outlet.put([lambda: growth])
    may_go_on.set()
    outlet.close()

    steps = [wire.parse(fields[b"step"], wire.TokenDeltas, "msgpack") for _, fields in redis.xrange(store.TOKENS)]
    assert [len(step) for step in steps] == [1, 5]


def test_what_is_streamed_is_not_written_to_the_disk(tmp_path: Path):
    with RedisServer(tmp_path / "r") as server, Redis.from_url(server.url) as redis:
        outlet = TokenPublisher(redis)
        before = redis.info("persistence")["aof_current_size"]

        outlet.put([lambda: wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])])
        outlet.close()

        assert redis.xlen(store.TOKENS) == 1
        assert redis.info("persistence")["aof_current_size"] == before
        redis.set("what is", "written")
        assert redis.info("persistence")["aof_current_size"] > before


def test_a_redis_that_is_away_costs_the_stream_and_nothing_else():
    outlet = TokenPublisher(Redis(port=1, socket_connect_timeout=0.1))

    outlet.put([lambda: wire.TokenDelta(id="j", sequence=0, first=0, token_ids=[1], token_bytes=[b"a"])])

    outlet.close()


def test_a_job_that_does_not_ask_streams_nothing(workers: Workers, redis: Redis):
    workers.start("--burst")
    job_id = submit(redis, wire.Generate(model="demo", prompt="a", max_tokens=3))
    until(lambda: redis.exists(store.Keys.outcome(job_id)))

    assert redis.xlen(store.TOKENS) == 0
