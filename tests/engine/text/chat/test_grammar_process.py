"""A grammar can use no more than a little time and memory, and a process that ends starts again where it was."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from scorepool.engine import ChatCodec, InvalidRequest, Tokenizer
from scorepool.engine.text.chat.grammar import Function, StructuredOutputSpec
from scorepool.engine.text.chat.grammar_compiler import GrammarConstraint
from scorepool.engine.text.chat.grammar_process import compile_queue, fork_server, grammars
from scorepool.engine.text.chat.grammar_process.compile_queue import LANES, CompileQueue, Lane
from scorepool.engine.text.chat.grammar_process.fork_server_link import ForkServerLink, tokenizer_message
from tests.chat_formats import chat_codec_of, compile_constraint, ids_of
from tests.tiny_tokenizer import EOS, build_tokenizer

# Without limits: 34 s and 2.8 GB; a minute; 7 s.
BOMBS: list[dict[str, Any]] = [
    {"allOf": [{"type": "string", "pattern": f"(.*a){{{k}}}"} for k in range(1, 17)]},
    {"allOf": [{"type": "string", "pattern": f"(.*a){{{k}}}"} for k in range(1, 18)]},
    {"type": "integer", "multipleOf": 999_983},
]
# Refused or harmless, and at once.
LARGE: list[dict[str, Any]] = [
    {"enum": [f"v{number}" for number in range(30_000)]},
    {"enum": ["v" * number for number in range(1000)]},
    {"type": "array", "minItems": 10**9, "maxItems": 10**9, "items": {"type": "integer"}},
    {"type": "string", "minLength": 10**9, "maxLength": 10**9},
    {"type": "string", "pattern": "^(((a{1,99}){1,99}){1,99}){1,99}$"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {}}} for j in range(3)]} for i in range(12)]},
]


def a_codec() -> ChatCodec:
    return ChatCodec(Tokenizer(build_tokenizer(), [EOS]))


def constraint_of(chat: ChatCodec, schema: dict[str, Any], owner: str = "") -> GrammarConstraint:
    return chat.grammar_compiler.constraints(StructuredOutputSpec(json_schema=schema), None, owner)[0]


def processes() -> list[psutil.Process]:
    """Return the fork servers of this process and what they forked."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.is_running() and is_ours(child)]


def is_ours(process: psutil.Process) -> bool:
    try:
        return any("fork_server" in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def short_limits() -> Iterator[None]:
    """Compile for a tenth of a second at most, so that a test of the last lane is short."""
    lanes = compile_queue.LANES, grammars.LANES
    compile_queue.LANES = grammars.LANES = (LANES[0], Lane(0.2, num_slots=1, niceness=0))
    try:
        yield
    finally:
        compile_queue.LANES, grammars.LANES = lanes


@pytest.mark.parametrize("schema", BOMBS)
def test_a_schema_that_takes_too_long_is_refused_and_remembered(schema: dict[str, Any]):
    with short_limits():
        chat = a_codec()
        with pytest.raises(InvalidRequest, match="compiling it takes more than"):
            constraint_of(chat, schema).compile().result(60)
        again = constraint_of(chat, schema).compile()
    assert again.done()


@pytest.mark.parametrize("schema", LARGE)
def test_a_large_schema_is_refused_or_followed(schema: dict[str, Any]):
    constraint = constraint_of(a_codec(), schema)
    error = constraint.compile().exception(60)
    assert len(str(error)) < 400
    assert error is not None or any(constraint.token_bitmask([]))


def test_the_parameters_of_a_tool_that_take_too_long_are_refused():
    function = Function(name="look", parameters={"properties": {"a": BOMBS[0]}}, strict=True)
    spec = StructuredOutputSpec(functions=[function], must_call=True)
    with short_limits(), pytest.raises(InvalidRequest, match="compiling it takes more than"):
        compile_constraint(chat_codec_of.__wrapped__("json_tools"), spec, [])


def test_many_large_tools_are_bounded_by_their_characters():
    parameters = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(500)}}
    functions = [Function(name=f"f{number}", parameters=parameters) for number in range(128)]
    with pytest.raises(InvalidRequest, match=r"has [0-9]+ characters, and the limit is 1048576"):
        chat_codec_of("json_tools").grammar_compiler.constraints(StructuredOutputSpec(functions=functions), [])


def test_memory_is_bounded_while_a_grammar_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The limit is lowered in a copy of the script, because the server runs it as its own process."""
    script = tmp_path / "fork_server.py"
    script.write_text(Path(fork_server.__file__).read_text().replace("384 * 2**20", "20 * 2**20"))
    monkeypatch.setattr(fork_server, "__file__", str(script))
    with pytest.raises(InvalidRequest, match="more than 384 MiB of memory"):
        compile_constraint(a_codec(), StructuredOutputSpec(json_schema=BOMBS[0]), None)


def test_a_grammar_whose_steps_take_long_ends_its_sequences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    script = tmp_path / "fork_server.py"
    source = Path(fork_server.__file__).read_text()
    script.write_text(source.replace("SPENT_S = 1.0", "SPENT_S = 0.02").replace("PER_STEP_S = 0.02", "PER_STEP_S = 0"))
    monkeypatch.setattr(fork_server, "__file__", str(script))
    chat = chat_codec_of("json_tools")
    chat = ChatCodec(chat.tokenizer)
    constraint = constraint_of(chat, {"type": "string", "pattern": "^(.*a.{500}b)+$"})
    generated = ids_of("json_tools", '"')
    for _ in range(2000):
        constraint.token_bitmask(generated)
        if constraint.error:
            break
        generated = [*generated, *ids_of("json_tools", "a" if len(generated) % 3 else "b")]
    assert "finding what may follow takes more than" in str(constraint.error)


def test_a_killed_process_starts_again_where_it_was():
    chat = ChatCodec(chat_codec_of("json_tools").tokenizer)
    constraint = constraint_of(chat, {"type": "array", "items": {"enum": ["abc"]}, "minItems": 2, "maxItems": 2})
    generated = ids_of("json_tools", '["ab')
    constraint.token_bitmask(generated)
    before = set(processes())
    for process in before:
        process.send_signal(signal.SIGKILL)

    allowed = constraint.token_bitmask([*generated, *ids_of("json_tools", "c")])

    (quote,) = ids_of("json_tools", '"')
    assert [index for index in range(len(allowed) * 8) if allowed[index // 8] >> index % 8 & 1] == [quote]
    assert constraint.error is None


def test_processes_that_are_killed_now_and_then_are_no_fault_of_the_grammar():
    chat = ChatCodec(chat_codec_of("json_tools").tokenizer)
    constraint = constraint_of(chat, {"type": "array", "items": {"enum": ["abc"]}})
    generated = ids_of("json_tools", '["abc"')
    for length in range(len(generated)):
        constraint.token_bitmask(generated[:length])
        for process in processes():
            process.send_signal(signal.SIGKILL)

    constraint.token_bitmask(generated)

    assert constraint.error is None


def test_a_fork_that_fails_ends_no_other_process(monkeypatch: pytest.MonkeyPatch):
    def fails() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(fork_server.os, "fork", fails)
    control, ours = socket.socketpair()
    descriptor, other_end = socket.socketpair()
    server = fork_server.Server(control, None)
    with control, ours, other_end, server._wakeup, server._signaled:
        server._fork(7, descriptor.detach())
        assert ours.recv(64) == fork_server.EXITED.pack(7, -signal.SIGKILL)
        assert other_end.recv(1) == b""


def test_what_may_follow_proposed_tokens_is_known_up_to_one_that_may_not():
    chat = ChatCodec(chat_codec_of("json_tools").tokenizer)
    schema = {"type": "array", "items": {"enum": ["abc", "abd"]}, "minItems": 2, "maxItems": 2}
    steps, ahead = constraint_of(chat, schema), constraint_of(chat, schema)
    right, wrong = ids_of("json_tools", '["abc","abd"]'), ids_of("json_tools", "x")
    one_by_one = [steps.token_bitmask(right[:length]) for length in range(len(right) + 1)]

    for start, num_right, rest in ((2, 3, wrong), (5, 0, wrong), (6, len(right) - 6, []), (len(right), 0, wrong * 2)):
        proposed = [*right[start : start + num_right], *rest]
        ahead.prepare(right[:start], proposed)
        found = [ahead.token_bitmask(right[:start], number) for number in range(num_right + 1)]

        assert found == one_by_one[start : start + num_right + 1]
        assert ahead.num_foreseen == num_right
    assert ahead.error is None


def test_a_grammar_that_fails_after_a_proposed_token_fails_only_if_it_comes_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    script = tmp_path / "fork_server.py"
    source = Path(fork_server.__file__).read_text()
    script.write_text(source.replace("if ahead.is_error():\n", "if len(bitmasks) == 3:\n"))
    monkeypatch.setattr(fork_server, "__file__", str(script))
    constraint = constraint_of(ChatCodec(chat_codec_of("json_tools").tokenizer), {"enum": ["abcdef"]})

    constraint.prepare([], ids_of("json_tools", '"abcdef"'))

    assert constraint.wait(60)
    assert (constraint.num_foreseen, constraint.error) == (2, None)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Collect the sockets that are made as pairs."""
    found: list[socket.socket] = []
    make_pair = socket.socketpair

    def collect() -> tuple[socket.socket, socket.socket]:
        pair = make_pair()
        found.extend(pair)
        return pair

    monkeypatch.setattr(socket, "socketpair", collect)
    return found


@pytest.mark.parametrize("executable", ["/bin/false", "/no/such/file"])
def test_a_server_that_does_not_start_leaves_no_socket(
    executable: str, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError):  # noqa: PT011 - a broken pipe, or no such file
        ForkServerLink(bytes(10**7))
    assert [one.fileno() for one in sockets] == [-1, -1]


def test_a_fork_of_a_server_that_has_ended_leaves_no_socket(sockets: list[socket.socket]):
    link = ForkServerLink(b"{}")  # no tokenizer: it ends
    link._server.wait(60)
    sockets.clear()
    with pytest.raises(OSError):  # noqa: PT011 - a broken pipe, or a reset connection
        link.fork(1)
    assert [one.fileno() for one in sockets] == [-1, -1]
    link.close()


def test_a_grammar_whose_processes_die_again_and_again_fails():
    chat = a_codec()
    compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)
    known = set(processes())
    compiled = constraint_of(chat, BOMBS[0]).compile()
    deadline = time.monotonic() + 60
    while not compiled.done() and time.monotonic() < deadline:
        for process in set(processes()) - known:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.005)
    with pytest.raises(InvalidRequest, match=r"ended 2 times from outside|takes more than"):
        compiled.result(0)


CHILD = """
import os, signal, sys, time
from pathlib import Path
import psutil
from scorepool.engine.text.chat.grammar_process.grammars import Grammars
grammars = Grammars(Path(sys.argv[1]).read_bytes)
of = lambda text: grammars.compile(grammars.get(text, "", lambda text, error: error))
of('start: "a"').result(60)
of("start: %json " + sys.argv[2])
while len(children := psutil.Process().children(recursive=True)) < 3:
    time.sleep(0.01)
print(*[child.pid for child in children])
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_processes_end_with_the_one_that_started_them(root: Path, tmp_path: Path):
    (tmp_path / "tokenizer").write_bytes(
        tokenizer_message(json.loads(build_tokenizer().backend_tokenizer.to_str()), [EOS])
    )
    argv = [sys.executable, "-c", CHILD, str(tmp_path / "tokenizer"), json.dumps(BOMBS[0])]

    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False, timeout=60)

    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 3, done.stderr
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    assert [process for process in alive if is_ours(process)] == []


def test_the_processes_end_with_the_compiler():
    before = set(processes())
    chat = a_codec()
    compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)
    started = set(processes()) - before
    assert started
    del chat
    _, alive = psutil.wait_procs(list(started), timeout=30)
    assert [one for one in alive if is_ours(one)] == []


def test_the_processes_know_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCOREPOOL_API_KEYS", "alice:hash")
    before = set(processes())
    compile_constraint(a_codec(), StructuredOutputSpec(json_schema={"type": "object"}), None)
    for process in set(processes()) - before:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            assert "SCOREPOOL_API_KEYS" not in process.environ()


def test_a_failure_of_the_thread_fails_what_waits_and_nothing_later(monkeypatch: pytest.MonkeyPatch):
    chat = a_codec()
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "ForkServerLink", lambda tokenizer: 1 / 0)
        with pytest.raises(RuntimeError, match="were ended"):
            compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)

    compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled():
    chat = a_codec()
    constraint = constraint_of(chat, BOMBS[0])
    compiled = constraint.compile()
    while constraint._grammar.state != "compiling":
        time.sleep(0.01)

    compiled.cancel()

    deadline = time.monotonic() + 60
    while constraint._grammar.state != "idle" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert constraint._grammar.state == "idle"
    assert constraint._grammar.connection is None


def test_canceled_grammars_that_never_ran_cost_their_owner_nothing():
    chat = a_codec()
    running = [constraint_of(chat, bomb).compile() for bomb in BOMBS]
    for future in [*running, *(constraint_of(chat, {"const": number}).compile() for number in range(20))]:
        future.cancel()
    compile_constraint(chat, StructuredOutputSpec(json_schema={"type": "object"}), None)
    assert chat.grammar_compiler.grammars._queue._clock_of("") < 60


class Grammar:
    def __init__(self, owner: str, lane: Lane = LANES[0]) -> None:
        self.owner = owner
        self.lane = lane


def test_an_owner_of_many_slow_grammars_waits_for_itself():
    queue: CompileQueue[Grammar] = CompileQueue()
    for _ in range(50):
        queue.put(Grammar("hostile"))
    running = [queue.take(), queue.take()]
    assert queue.take() is None
    innocent = Grammar("innocent")
    queue.put(innocent)
    assert running[0] is not None
    queue.done(running[0], 0.05)
    assert queue.take() is innocent


def test_a_long_lane_does_not_hold_up_the_short_one():
    queue: CompileQueue[Grammar] = CompileQueue()
    for _ in range(3):
        queue.put(Grammar("hostile", LANES[-1]))
    assert queue.take() is not None
    assert queue.take() is None
    queue.put(Grammar("hostile"))
    assert queue.take() is not None


def test_what_one_owner_compiled_tells_another_nothing():
    chat = a_codec()
    one, other = (constraint_of(chat, {"type": "object"}, owner) for owner in ("one", "other"))
    one.compile().result(60)
    assert other._grammar.state == "idle"
    assert constraint_of(chat, {"type": "object"}, "one")._grammar.state == "ready"


def test_idle_processes_are_ended_and_come_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "MAX_PROCESSES", 2)
    chat = a_codec()
    constraints = [constraint_of(chat, {"const": letter}) for letter in "abcd"]
    for constraint in constraints:
        constraint.compile().result(60)
    for _ in range(2):
        for constraint in constraints:
            constraint.token_bitmask([])
            token_ids, _ = chat.tokenizer.encode('"', add_bos=False)
            assert constraint.token_bitmask(token_ids)
            assert constraint.error is None
