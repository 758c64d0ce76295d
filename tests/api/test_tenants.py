"""Jobs belong to the owner of the API key that submitted them; no other owner sees them."""

import hashlib
import logging
from pathlib import Path

import pytest
from redis import Redis

from scorepool.api.auth import Keyring
from scorepool.api.http.loopback import is_loopback
from scorepool.store import Settings, SettingsError
from tests.api.conftest import ALICE, BOB, KEYS, Serving, bearer, generate, score
from tests.api.fake_worker import FakeWorker

pytestmark = pytest.mark.anyio
DIGEST = hashlib.sha256(b"key").hexdigest()
ROUTES_WITH_ID = [("GET", ""), ("GET", "?wait=5"), ("POST", "/cancel"), ("DELETE", "")]


@pytest.mark.parametrize("is_ended", [False, True])
async def test_another_keys_job_is_404_on_every_route_and_stays_untouched(
    serving: Serving, worker: FakeWorker, is_ended: bool
):
    async with serving(api_keys=KEYS) as http:
        id_ = (await http.post("/v1/jobs", json=score(), headers=bearer(ALICE))).json()["id"]
        if is_ended:
            worker.end(id_)
        before = (await http.get(f"/v1/jobs/{id_}", headers=bearer(ALICE))).json()
        for method, rest in ROUTES_WITH_ID:
            foreign = await http.request(method, f"/v1/jobs/{id_}{rest}", headers=bearer(BOB))
            absent = await http.request(method, f"/v1/jobs/{'0' * 32}{rest}", headers=bearer(BOB))
            assert (foreign.status_code, absent.status_code) == (404, 404)
            assert foreign.text == absent.text.replace("0" * 32, id_)
        assert (await http.get("/v1/jobs", headers=bearer(BOB))).json()["jobs"] == []
        assert (await http.get(f"/v1/jobs/{id_}", headers=bearer(ALICE))).json() == before
        assert [job["id"] for job in (await http.get("/v1/jobs", headers=bearer(ALICE))).json()["jobs"]] == [id_]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "Basic YTpi"}, bearer("no")])
async def test_without_a_known_key_every_route_of_v1_is_401(serving: Serving, headers: dict[str, str]):
    async with serving(api_keys=KEYS) as http:
        for method, path in [
            *((method, f"/v1/jobs/{'0' * 32}{rest}") for method, rest in ROUTES_WITH_ID),
            ("POST", "/v1/jobs"),
            ("POST", "/v1/jobs/bulk"),
            ("GET", "/v1/jobs"),
            ("GET", "/v1/jobs/ended"),
            ("GET", "/v1/models"),
        ]:
            reply = await http.request(method, path, headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.json()["error"]["field"] == "Authorization"


async def test_two_keys_in_one_request_are_refused(serving: Serving):
    async with serving(api_keys=KEYS) as http:
        for keys in ((ALICE, BOB), (ALICE, ALICE), (ALICE, "")):
            headers = [("Authorization", f"Bearer {key}") for key in keys]
            assert (await http.get("/v1/jobs", headers=headers)).status_code == 401


async def test_a_key_may_come_as_anthropics_clients_send_it(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/none"):
            reply = await http.post(path, json=body, headers={"x-api-key": "no"})
            if path.endswith("none"):
                assert reply.status_code == 404
                continue
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
            assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
        assert (await http.get("/v1/jobs", headers={"x-api-key": ALICE})).status_code == 200
        assert (await http.get("/v1/jobs", headers={"x-api-key": ALICE} | bearer(ALICE))).status_code == 200
        assert (await http.get("/v1/jobs", headers={"x-api-key": ALICE} | bearer(BOB))).status_code == 401
        assert (await http.get("/v1/jobs", headers=[("x-api-key", ALICE)] * 2)).status_code == 401


async def test_without_keys_any_authorization_is_ignored(serving: Serving, worker: FakeWorker):
    async with serving() as http:
        for headers in (
            {"Authorization": "Bearer "},
            {"Authorization": "Basic x"},
            bearer("anything"),
            {"x-api-key": "a"},
        ):
            assert (await http.get("/v1/jobs", headers=headers)).status_code == 200


async def test_keys_from_the_variable_and_the_file_are_accepted_and_can_be_rotated(tmp_path: Path):
    file = tmp_path / "keys"
    second = hashlib.sha256(b"second").hexdigest()
    file.write_text(f"# keys\n\nalice:{second.upper()}\nbob:{hashlib.sha256(b'b').hexdigest()}\n")
    keyring = Keyring.load(Settings(api_keys=f"alice:{DIGEST}", api_keys_file=str(file)))
    assert [keyring.owner(key) for key in ("key", "second", "b")] == ["alice", "alice", "bob"]


async def test_a_weight_belongs_to_the_name(tmp_path: Path):
    second = hashlib.sha256(b"second").hexdigest()
    keyring = Keyring.load(
        Settings(api_keys=f"alice:{DIGEST}:5,alice:{second}:5,bob:{hashlib.sha256(b'b').hexdigest()}")
    )
    assert [keyring.weight(keyring.owner(key)) for key in ("key", "second", "b")] == [5, 5, 1]
    with pytest.raises(SettingsError, match="entry 2: another key of alice has the weight 5, this 1"):
        Keyring.load(Settings(api_keys=f"alice:{DIGEST}:5,alice:{second}"))


@pytest.mark.parametrize(
    "text",
    ["key", f"a b:{DIGEST}", f"alice:{DIGEST[:-1]}", f":{DIGEST}", "alice:my-secret-key"]
    + [f"bob:{DIGEST}:{weight}" for weight in ("", "0", "-1", "1.5", "1000")],
)
async def test_a_bad_key_entry_stops_the_start_without_being_shown(text: str):
    with pytest.raises(SettingsError, match="SCOREPOOL_API_KEYS, entry 2") as caught:
        Keyring.load(Settings(api_keys=f"alice:{DIGEST},{text}"))
    assert "my-secret-key" not in str(caught.value)
    assert DIGEST not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "\n", ",", " , ,", "# none", "# none\n#alice:,\n\n"])
async def test_keys_that_are_set_and_hold_no_key_stop_the_start(text: str, tmp_path: Path):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SettingsError, match="SCOREPOOL_API_KEYS is set and "):
        Keyring.load(Settings.load({"SCOREPOOL_API_KEYS": text}))
    for path in (text, str(tmp_path / "keys"), str(tmp_path / "missing")):
        for keys in ({}, {"SCOREPOOL_API_KEYS": KEYS}):
            with pytest.raises(SettingsError, match="SCOREPOOL_API_KEYS_FILE"):
                Keyring.load(Settings.load(keys | {"SCOREPOOL_API_KEYS_FILE": path}))


async def test_the_key_of_a_client_without_keys_of_the_server_stops_the_start(tmp_path: Path):
    """SCOREPOOL_API_KEY is a setting of clients, and the likeliest misspelling of SCOREPOOL_API_KEYS."""
    with pytest.raises(SettingsError, match="SCOREPOOL_API_KEYS") as caught:
        Keyring.load(Settings.load({"SCOREPOOL_API_KEY": "sp_secret"}))
    assert "env -u SCOREPOOL_API_KEY scorepool serve" in str(caught.value)
    assert "sp_secret" not in str(caught.value)
    (tmp_path / "keys").write_text(KEYS.split(",")[0])
    for keys in ({"SCOREPOOL_API_KEYS": KEYS}, {"SCOREPOOL_API_KEYS_FILE": str(tmp_path / "keys")}):
        assert Keyring.load(Settings.load(keys | {"SCOREPOOL_API_KEY": "sp_secret"}))


async def test_a_key_file_that_every_user_may_write_to_stops_the_start(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(KEYS.replace(",", "\n"))
    file.chmod(0o646)
    with pytest.raises(SettingsError, match="chmod o-w"):
        Keyring.load(Settings(api_keys_file=str(file)))
    file.chmod(0o644)
    assert Keyring.load(Settings(api_keys_file=str(file))).owner(ALICE) == "alice"


async def test_the_name_of_a_server_without_keys_is_reserved():
    with pytest.raises(SettingsError, match="entry 2: the name 'local' belongs to servers without keys"):
        Keyring.load(Settings(api_keys=f"alice:{DIGEST},local:{DIGEST}"))


async def test_one_key_belongs_to_one_name():
    with pytest.raises(SettingsError, match="alice and bob have the same key"):
        Keyring.load(Settings(api_keys=f"alice:{DIGEST},bob:{DIGEST.upper()}"))


async def test_metrics_name_no_owner_and_no_text_of_a_client(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS) as http:
        secret_model = score(model="alices-secret", wait_for_model=True)
        id_ = (await http.post("/v1/jobs", json=secret_model, headers=bearer(ALICE))).json()["id"]
        await http.get(f"/v1/jobs/{id_}", headers=bearer(ALICE))
        await http.get("/made/up/path")
        assert (await http.request("MADE-UP", "/healthz")).status_code == 405
        text = (await http.get("/metrics")).text
    for word in ("alice", "bob", id_, "made", "MADE-UP", ALICE):
        assert word not in text
    assert 'scorepool_queue_jobs{queue="(unserved)",state="queued"} 1.0' in text
    assert 'scorepool_http_reply_seconds_count{method="(any)",route="/healthz",status="405"} 1.0' in text


async def test_prompts_and_keys_are_not_logged(serving: Serving, worker: FakeWorker, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with serving(api_keys=KEYS) as http:
        body = score(items=[{"prompt": "my-prompt", "completion": "my-completion"}])
        await http.post("/v1/jobs", json=body, headers=bearer(ALICE))
        await http.post("/v1/jobs", json=body | {"bad": 1}, headers=bearer(ALICE))
    assert not any(word in caplog.text for word in ("my-prompt", "my-completion", ALICE))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "", "192.168.1.5", "example.com", "localhost.example.com")],
)
async def test_loopback_is_known_by_its_address(host: str, expected: bool):
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "192.168.1.5:8000", "[2001:db8::1]:8000"])
async def test_without_keys_a_rebound_host_name_is_refused(serving: Serving, host: str, redis: Redis):
    async with serving() as http:
        refused = await http.get("/v1/jobs", headers={"Host": host})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        for local in ("localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
            assert (await http.get("/v1/jobs", headers={"Host": local})).status_code == 200
    async with serving(api_keys=KEYS) as http:
        assert (await http.get("/v1/jobs", headers=bearer(BOB) | {"Host": host})).status_code == 200


async def test_only_the_keys_that_the_operator_names_may_use_priority_high(serving: Serving, worker: FakeWorker):
    async with serving(api_keys=KEYS, high_priority_keys="carol, bob") as client:
        jobs = [generate(), generate(priority="high")]
        refused = await client.post("/v1/jobs/bulk", json=jobs, headers=bearer(ALICE))
        assert (refused.status_code, refused.json()["error"]["field"]) == (403, "[1].priority")
        assert (await client.post("/v1/jobs", json=generate(priority="low"), headers=bearer(ALICE))).status_code == 202
        assert (await client.post("/v1/jobs/bulk", json=jobs, headers=bearer(BOB))).status_code == 202
