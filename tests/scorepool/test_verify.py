"""`scorepool verify` computes results again and says equal, within the tolerance, different, or what is missing.

The demo model computes on a server and, in some tests, on a second stack of this machine. Results are falsified in the
server's Redis.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import httpx
import pytest
from msgspec.structs import replace
from redis import Redis
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from scorepool import Client, JobFailed, store, wire
from scorepool.cli import app
from scorepool.local.demo import free_port
from scorepool.local.stack import Stack
from scorepool.verify import on_server
from scorepool.verify import verify as compute_again
from scorepool.wire import Floats, Provenance, Result, SequenceResult

pytestmark = pytest.mark.timeout(240)
IDS = [1209, 274, 1794, 12, 345]
ITEMS = [wire.ScoreItem(prompt="import", completion=" os.path"), wire.ScoreItem(prompt="If the", completion=" file")]
SCORE = wire.Score(model="demo", items=ITEMS)
EVERYTHING = replace(SCORE, score="all", top_logprobs=5, rank=True, entropy=True, temperature=0.5)
SCORE_IDS = wire.Score(model="demo", items=[wire.ScoreItem(prompt=IDS, completion=[7, 8, 9])])
GENERATE = wire.Generate(model="demo", prompt="def add(", max_tokens=12, seed=1)
CHAT = wire.Generate(model="demo", messages=[wire.Message(role="user", content="What is os?")], max_tokens=8)
PROCESSED = replace(GENERATE, temperature=0.8, prompt_logprobs=True, logprobs_mode="processed_logprobs")
REQUESTS = {
    "score": SCORE,
    "score everything": EVERYTHING,
    "score ids": replace(SCORE_IDS, score="all", top_logprobs=1),
    "generate": replace(GENERATE, n=3, top_logprobs=3, rank=True),
    "generate greedily": replace(GENERATE, temperature=0.0, repetition_penalty=1.5, prompt_logprobs=True),
    "generate hot": replace(GENERATE, temperature=1.7),
    "generate from ids": replace(GENERATE, prompt=IDS, prompt_logprobs=True),
    "generate packed": replace(GENERATE, temperature=0.0, prompt_logprobs=True, packed=True),
    "generate packed hot": replace(GENERATE, temperature=0.8, prompt_logprobs=True, packed=True),
    "score with all logprobs": replace(SCORE, top_logprobs=-1),
    "report a prompt": replace(GENERATE, prompt=IDS, max_tokens=0, prompt_logprobs=True),
    "generate processed": replace(PROCESSED, top_logprobs=3, rank=True),
    "chat": CHAT,
}


@pytest.fixture(scope="module", params=["default", "exact"])
def stack(request: pytest.FixtureRequest, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("s")
    environ = {"SCOREPOOL_PORT": str(free_port()), "SCOREPOOL_MODE": request.param}
    with Stack([f"demo={demo(root)}"], state=state, environ=environ, logs=state / "logs") as stack:
        yield stack


def demo(root: Path) -> Path:
    return root / "scorepool" / "models" / "demo"


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url) as client:
        yield client


@pytest.fixture
def verify(stack: Stack) -> Callable[..., tuple[int, str]]:
    """Run `scorepool verify` on the stack's jobs; return its status and its output."""

    def verify(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["verify", "--url", stack.url, *arguments], catch_exceptions=False)
        return done.exit_code, done.output

    return verify


Verify = Callable[..., tuple[int, str]]


def submit(client: Client, request: wire.Request) -> str:
    """Run a job to its end and return its id."""
    job = client.submit(request)
    job.result(60)
    return job.id


def falsify(stack: Stack, job_id: str, change: Callable[[Result], Result]) -> None:
    """Change the result that Redis holds."""
    key = store.Keys.outcome(job_id)
    with Redis.from_url(stack.redis_url) as redis:
        outcome = wire.decode_outcome(redis.get(key) or b"")
        assert isinstance(outcome, Result)
        redis.set(key, wire.encode(change(outcome)), keepttl=True)


def change_sequence(index: int, change: Callable[[SequenceResult], SequenceResult]) -> Callable[[Result], Result]:
    def falsified(result: Result) -> Result:
        sequences = list(result.sequences)
        sequences[index] = change(sequences[index])
        return replace(result, sequences=sequences)

    return falsified


def shift(column: str, index: int, entry: int, nats: float) -> Callable[[Result], Result]:
    """Shift one value of a column."""

    def shifted(sequence: SequenceResult) -> SequenceResult:
        values = Floats(getattr(sequence, column))
        values[entry] += nats
        return replace(sequence, **{column: values})

    return change_sequence(index, shifted)


def test_programs_read_json(client: Client, verify: Verify):
    status, output = verify(submit(client, SCORE), "no-such-job", "--json")
    confirmed, unknown = map(json.loads, output.splitlines())
    assert status == 2
    assert confirmed["verdict"] in ("equal", "within")
    assert unknown.items() >= {"id": "no-such-job", "verdict": "unknown"}.items()
    assert "no-such-job" in unknown["sentence"]


def test_every_kind_of_result_is_confirmed_and_nothing_is_left_behind(stack: Stack, client: Client, verify: Verify):
    ids = {submit(client, request): name for name, request in REQUESTS.items()}
    with Redis.from_url(stack.redis_url) as redis:
        before = {key for key in redis.scan_iter() if b"outcome" in key or b"rq:job:" in key}

        status, output = verify(*ids)

        assert {key for key in redis.scan_iter() if b"outcome" in key or b"rq:job:" in key} == before
    assert status == 0, output
    for (job_id, name), line in zip(ids.items(), output.splitlines(), strict=True):
        assert line.startswith(f"{job_id}: "), name
        is_exact = stack.settings.mode == "exact" and name not in (
            "generate hot",
            "generate processed",
            "generate packed hot",
        )
        within = "" if is_exact else r"|within the tolerance of \S+ nats \(\w+, float32\), \d+ tokens, the largest .*"
        assert re.fullmatch(rf"\w+: (equal to the bit, \d+ tokens{within})", line), (name, line)


def test_targets_are_named_as_not_verified(client: Client, verify: Verify):
    status, output = verify(submit(client, replace(SCORE, targets=[5, 7])))

    assert status == 0
    assert "target_logprobs are not verified" in output


def text_of(result: Result, index: int, entry: int) -> str:
    """Name a token as `verify` does."""
    sequence = result.sequences[index]
    position = sequence.num_prompt_tokens - sequence.num_reported_prompt_tokens + entry
    return f"different at sequence {index}, position {position}, token {sequence.token_ids[entry]}: "


@pytest.mark.parametrize(
    ("request_", "index", "entry", "column"),
    [
        (SCORE, 1, 0, "logprobs"),
        (SCORE, 0, 1, "logprobs"),
        (EVERYTHING, 1, 1, "logprobs"),
        (EVERYTHING, 0, 2, "entropies"),
        (replace(GENERATE, n=2), 1, 7, "logprobs"),
        (replace(GENERATE, temperature=0.0), 0, 3, "sampled_logprobs"),
        (CHAT, 0, 2, "logprobs"),
    ],
)
def test_the_first_token_that_differs_is_named(
    stack: Stack, client: Client, verify: Verify, request_: wire.Request, index: int, entry: int, column: str
):
    job_id = submit(client, request_)
    right = client.result(job_id)
    falsify(stack, job_id, shift(column, index, entry, -0.25))

    status, output = verify(job_id)

    assert status == 1
    value = getattr(right.sequences[index], column)[entry]
    assert text_of(right, index, entry) in output
    found = re.search(r": (\S+) (\S+) and (\S+); 1 of \d+ tokens differ by more than", output)
    assert found is not None, output
    assert found[1] == column.removesuffix("s").replace("ie", "y")
    assert float(found[2]) == pytest.approx(value - 0.25, abs=1e-4)
    assert float(found[3]) == pytest.approx(value, abs=1e-4)


def test_a_sequence_after_an_item_that_failed_is_named_by_its_place(stack: Stack, client: Client, verify: Verify):
    too_long = wire.ScoreItem(prompt="x " * 5000, completion=" y")
    job_id = submit(client, replace(SCORE, items=[too_long, *ITEMS], on_item_error="report"))
    assert verify(job_id)[0] == 0
    right = client.result(job_id)
    falsify(stack, job_id, shift("logprobs", 2, 0, -0.25))

    status, output = verify(job_id)

    assert status == 1
    assert text_of(right, 2, 0) in output


def test_what_is_computed_again_has_the_cache_salt_of_the_request(client: Client):
    salted = replace(GENERATE, temperature=0.8, cache_salt="a")
    submitted: list[wire.Score] = []

    def recompute(request: wire.Score) -> Result:
        submitted.append(request)
        return on_server(client, 60)(request)

    verdict = compute_again(client.job(submit(client, salted)), recompute, salted)
    assert verdict.kind in ("equal", "within")
    assert [request.cache_salt for request in submitted] == ["a", "a"]


@pytest.mark.parametrize(("timeout_s", "job_timeout_s"), [(0.5, 1), (7200.5, 7201), (1e9, 86_400)])
def test_a_job_may_take_as_long_as_the_user_waits_for_it(timeout_s: float, job_timeout_s: int):
    submitted: list[wire.Request] = []

    class Recorder(Client):
        def submit(self, request: wire.Request, **_: Any) -> NoReturn:
            submitted.append(request)
            raise TimeoutError

    with Recorder("http://127.0.0.1:9") as client, pytest.raises(TimeoutError):
        on_server(client, timeout_s)(SCORE)
    assert submitted == [replace(SCORE, timeout_s=job_timeout_s)]


def test_exact_mode_tolerates_nothing_and_default_mode_rounding(stack: Stack, client: Client, verify: Verify):
    job_id = submit(client, SCORE)
    falsify(stack, job_id, shift("logprobs", 0, 0, 5e-4))

    status, output = verify(job_id)

    if stack.settings.mode == "exact":
        assert (status, "different at sequence 0, position 1" in output) == (1, True)
    else:
        assert (status, "within the tolerance of 0.001 nats (default, float32)" in output) == (0, True)


def test_other_tokens_and_other_top_tokens_differ(stack: Stack, client: Client, verify: Verify):
    token, top, unpredicted = [submit(client, EVERYTHING) for _ in range(3)]
    falsify(stack, token, change_sequence(1, lambda one: replace(one, token_ids=[*one.token_ids[:-1], 5])))
    falsify(stack, top, change_sequence(0, lambda one: replace(one, top_ids=[*one.top_ids[:-1], [1, 2, 3, 4, 5]])))
    falsify(stack, unpredicted, change_sequence(1, lambda one: replace(one, logprobs=Floats([0.0, *one.logprobs[1:]]))))

    status, output = verify(token, top, unpredicted)

    assert status == 1
    lines = output.splitlines()
    assert lines[0].startswith(f"{token}: different at sequence 1, position ")
    assert ", token 5: " in lines[0]
    assert re.match(rf"{top}: different at sequence 0, position \d+, token \d+: top logprob of token \d+ ", lines[1])
    assert lines[2].startswith(f"{unpredicted}: different at sequence 1, position 0, token ")


def test_sampled_logprobs_are_verified_if_the_request_says_that_they_depend_on_the_temperature_alone(
    stack: Stack, client: Client, verify: Verify, tmp_path: Path
):
    request = replace(GENERATE, temperature=1.7)
    job_id, filtered = submit(client, request), submit(client, replace(request, top_k=3))
    falsify(stack, job_id, shift("sampled_logprobs", 0, 4, 0.25))
    path = tmp_path / "request.json"
    path.write_bytes(wire.encode_json(request))

    for job in (job_id, filtered):
        status, output = verify(job)
        assert (status, "sampled_logprobs are not verified" in output) == (0, True)
    status, output = verify(job_id, "--request", str(path))
    assert (status, ": sampled_logprob -" in output) == (1, True)
    path.write_bytes(wire.encode_json(replace(request, top_k=3)))
    status, output = verify(filtered, "--request", str(path))
    assert (status, "sampled_logprobs are not verified" in output) == (0, True)


def test_processed_logprobs_are_different_only_if_no_filter_can_be_the_reason(
    stack: Stack, client: Client, verify: Verify, tmp_path: Path
):
    filtered = replace(PROCESSED, top_k=3)
    completion, prompt, by_filter = submit(client, PROCESSED), submit(client, filtered), submit(client, filtered)
    num_prompt = client.result(completion).sequences[0].num_prompt_tokens
    falsify(stack, completion, shift("logprobs", 0, num_prompt + 4, 0.25))
    falsify(stack, prompt, shift("logprobs", 0, 1, 0.25))
    path = tmp_path / "request.json"

    status, output = verify(completion, by_filter)
    assert status == 2
    for line in output.splitlines():
        assert ": cannot tell: its logprobs are processed, and filters or penalties, which a result does not" in line
    status, output = verify(prompt)
    assert (status, "different at sequence 0, position 1, " in output) == (1, True)
    path.write_bytes(wire.encode_json(PROCESSED))
    status, output = verify(completion, "--request", str(path))
    assert (status, f"different at sequence 0, position {num_prompt + 4}, " in output) == (1, True)
    path.write_bytes(wire.encode_json(filtered))
    status, output = verify(by_filter, "--request", str(path))
    assert (status, "cannot tell: its logprobs are processed, and its request has filters" in output) == (2, True)


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "0" * 64), ("dtype", "bfloat16"), ("quantization", "4-bit")]
)
def test_a_result_of_another_model_is_not_compared(
    stack: Stack, client: Client, verify: Verify, field: str, value: str
):
    job_id = submit(client, SCORE)
    falsify(stack, job_id, lambda result: replace(result, stamp=replace(result.stamp, **{field: value})))

    status, output = verify(job_id)

    assert status == 2
    assert f"cannot tell: this model did not compute it: {field} {value!r} and " in output


def test_a_result_of_an_adapter_that_is_not_served_is_not_compared(stack: Stack, client: Client, verify: Verify):
    job_id = submit(client, SCORE)
    falsify(stack, job_id, lambda result: replace(result, stamp=replace(result.stamp, adapter="a@0123456789abcdef")))

    status, output = verify(job_id)

    assert (status, "cannot tell: the server refuses: adapter: " in output) == (2, True)


def test_other_modes_backends_and_versions_are_named_and_compared(stack: Stack, client: Client, verify: Verify):
    def older(stamp: Provenance) -> Provenance:
        mode = "exact" if stamp.mode == "default" else "default"
        return replace(stamp, mode=mode, backend="metal (M1)", versions=stamp.versions | {"mlx": "0.1"})

    right, wrong = [submit(client, SCORE) for _ in range(2)]
    for job_id in (right, wrong):
        falsify(stack, job_id, lambda result: replace(result, stamp=older(result.stamp)))
    falsify(stack, wrong, shift("logprobs", 0, 0, 0.1))

    outcomes = [verify(job_id) for job_id in (right, wrong)]

    assert [status for status, _ in outcomes] == [0, 1]
    for _, output in outcomes:
        assert re.search(r"; the stamps differ: mode '\w+' and '\w+'; backend 'metal \(M1\)' and 'cpu .*'; ", output)
        assert "version of mlx '0.1' and '0." in output


def test_ids_that_the_result_lacks_come_from_the_request(client: Client, verify: Verify, tmp_path: Path):
    generate = replace(GENERATE, prompt=IDS)
    path = tmp_path / "request.json"
    for request, other in [(SCORE_IDS, generate), (generate, replace(generate, prompt=[*IDS, 1]))]:
        job_id = submit(client, request)
        status, output = verify(job_id)
        assert status == 2
        assert "cannot tell: the prompt's token ids are missing" in output
        assert "--request FILE" in output
        path.write_bytes(wire.encode_json(request))
        assert verify(job_id, "--request", str(path))[0] == 0
        path.write_bytes(wire.encode_json(other))
        assert verify(job_id, "--request", str(path))[0] == (0 if other is generate else 2)
        status, output = verify(job_id, job_id, "--request", str(path))
        assert (status, "--request belongs to one JOB" in output) == (2, True)
    path.write_text(json.dumps({"type": "score", "model": "demo"}))
    status, output = verify(job_id, "--request", str(path))
    assert (status, "`items`" in output) == (2, True)


def test_what_cannot_be_verified_is_explained(client: Client, verify: Verify):
    failed = client.submit(
        wire.Score(model="demo", items=[wire.ScoreItem(prompt="word " * 20_000, completion="end")])
    ).id
    with pytest.raises(JobFailed):
        client.result(failed, timeout_s=60)
    jobs = {
        failed: "no result but a failure, too_long: ",
        client.submit(wire.Score(model="absent", items=ITEMS, wait_for_model=True)).id: "the job is queued",
        submit(client, wire.Tokenize(model="demo", prompt="a")): "a tokenize job computes no logprobs",
        submit(client, replace(GENERATE, logprobs=False)): "its request said logprobs: false",
        "0" * 32: "no job '000",
    }

    status, output = verify(*jobs)

    assert status == 2
    for line, (job_id, reason) in zip(output.splitlines(), jobs.items(), strict=True):
        assert line.startswith(f"{job_id}: cannot tell: ")
        assert reason in line


def test_what_was_not_computed_from_the_tokens_alone_is_not_called_different(
    stack: Stack, client: Client, verify: Verify
):
    """The tokens of images stand for what a result does not hold, and a sparse prefill leaves tokens out."""
    shows_images, is_sparse = submit(client, SCORE), submit(client, SCORE)
    for job_id in (shows_images, is_sparse):
        falsify(stack, job_id, shift("logprobs", 0, 0, 1.0))
    falsify(stack, shows_images, lambda result: replace(result, usage=replace(result.usage, images=1)))
    falsify(stack, is_sparse, lambda result: replace(result, stamp=replace(result.stamp, approximate="specprefill")))

    status, output = verify(shows_images, is_sparse)

    assert status == 2
    assert [line.partition(": ")[2] for line in output.splitlines()] == [
        "cannot tell: its prompts show images, which a result does not hold",
        "cannot tell: its numbers are not the model's for the whole prompt: specprefill",
    ]


def test_one_result_that_differs_decides_the_status(stack: Stack, client: Client, verify: Verify):
    equal, different = submit(client, SCORE), submit(client, SCORE)
    falsify(stack, different, shift("logprobs", 0, 0, 1.0))
    assert verify(equal, "0" * 32)[0] == 2
    assert verify("0" * 32, different, equal)[0] == 1


def test_a_url_that_can_never_work_is_named():
    done = CliRunner().invoke(app, ["verify", "--url", "nowhere", "a"])
    sentence = "cannot tell: the URL is 'nowhere': expected http://HOST:PORT, https://HOST or unix:///PATH"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"scorepool: {sentence}\n")


def test_an_api_that_does_not_answer_confirms_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("scorepool.verify.RETRY_S", 0.0)
    done = CliRunner().invoke(app, ["verify", "--url", f"http://127.0.0.1:{free_port()}", "a"], catch_exceptions=False)
    assert (done.exit_code, "a: cannot tell: the API does not answer: " in done.output) == (2, True)


@pytest.mark.parametrize("body", [b"<html>hello</html>", b"{}", wire.encode({"id": "a"})])
def test_a_server_of_something_else_confirms_and_denies_nothing(monkeypatch: pytest.MonkeyPatch, body: bytes):
    async def request(*_: object, **__: object) -> httpx.Response:
        return httpx.Response(200, content=body)

    monkeypatch.setattr("httpx.AsyncClient.request", request)
    done = CliRunner().invoke(app, ["verify", "a"], catch_exceptions=False)
    assert done.exit_code == 2
    assert re.match(r"a: cannot tell: what answers at \S+ is no scorepool API of this release", done.output)


def test_a_key_that_no_header_can_hold_confirms_and_denies_nothing():
    done = CliRunner().invoke(app, ["verify", "--key", "schlüssel", "a"], catch_exceptions=False)
    assert (done.exit_code, "the API key has characters that no key has" in done.output) == (2, True)


def test_a_job_whose_model_nobody_serves_is_not_confirmed_in_time(stack: Stack, client: Client, verify: Verify):
    job_id = submit(client, SCORE)
    with Redis.from_url(stack.redis_url) as redis:
        redis.set(store.RqKeys.suspended, 1)
        try:
            status, output = verify(job_id, "--timeout", "0.5")
        finally:
            redis.delete(store.RqKeys.suspended)
    assert (status, "cannot tell: it was not computed again in time" in output) == (2, True)


def verify_locally(stack: Stack, state: Path, *arguments: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).with_name("scorepool")), "verify", "--url", stack.url, *arguments]
    environ = os.environ | {"SCOREPOOL_STATE_DIR": str(state), "SCOREPOOL_API_KEYS": "x:y"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=200)
    assert "Traceback" not in done.stderr
    assert list(state.glob("verify-*")) == []
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def state() -> Iterator[Path]:
    """A folder with a short name: the path of a unix socket in it has at most 103 bytes."""
    with TemporaryDirectory(prefix="scorepool-") as folder:
        yield Path(folder)


@pytest.mark.parametrize("stack", ["exact"], indirect=True)
def test_results_are_verified_on_this_machine(stack: Stack, client: Client, root: Path, state: Path):
    right, wrong = submit(client, SCORE), submit(client, replace(GENERATE, n=2))
    falsify(stack, wrong, shift("logprobs", 1, 3, 0.25))

    status, output = verify_locally(stack, state, right, wrong, "--model", f"demo={demo(root)}")

    assert status == 1
    assert output.splitlines()[0] == f"{right}: equal to the bit, 3 tokens"
    assert "different at sequence 1, position " in output.splitlines()[1]


@pytest.mark.parametrize("stack", ["default"], indirect=True)
@pytest.mark.soak
def test_a_model_that_did_not_compute_the_result_confirms_nothing(
    stack: Stack, client: Client, root: Path, tmp_path: Path, state: Path
):
    job_id = submit(client, SCORE)
    other = Path(shutil.copytree(demo(root), tmp_path / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: weight * 1.01 for name, weight in weights.items()}, other / "model.safetensors")
    for model, reason in [
        (f"demo={other}", "this model did not compute it: fingerprint "),
        (f"other={other}", "its model is 'demo', and --model names other"),
        ("demo=/no/such/folder", "there is no folder '/no/such/folder'"),
        ("demo", "NAME[,ALIAS...]=FOLDER_OR_HUB_ID"),
    ]:
        status, output = verify_locally(stack, state, job_id, "--model", model)
        assert (status, reason in output) == (2, True), output
