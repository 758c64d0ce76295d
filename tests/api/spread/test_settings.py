"""SCOREPOOL_REDIS_URLS is checked at the start; contradictions are refused in one sentence, without a password."""

import asyncio
import json
from pathlib import Path

import pytest

from scorepool.api.connection import check_logins
from scorepool.store import ServerMap, Settings, SettingsError
from tests.api.spread.conftest import OtherServer

A, B = "redis://:hush@h1:6379/0", "redis://:hush@h2:6379/0"


def load(urls: object, **settings: str) -> ServerMap:
    return ServerMap.load(Settings(redis_urls=urls if isinstance(urls, str) else json.dumps(urls), **settings))


def test_home_has_what_the_map_does_not_name():
    one = load("")
    assert (one.is_one, one.of_model("x"), one.of_job("a" * 32)) == (True, 0, 0)
    servers = load({"a": A, "b": B, "c": B, "d": "redis://127.0.0.1"})
    assert [(server.url, server.models) for server in servers.servers] == [
        ("redis://127.0.0.1:6379/0", ("d",)), (A, ("a",)), (B, ("b", "c")),
    ]  # fmt: skip
    assert [servers.of_model(name) for name in "abcdx"] == [1, 2, 2, 0, 0]


def test_an_id_names_its_server_and_keeps_its_form():
    servers = load({"a": A, "b": B})
    ids = [server.stamp("0" * 32) for server in servers.servers]
    assert [len(job_id) for job_id in ids] == [32] * 3
    assert [servers.of_job(job_id) for job_id in ids] == [0, 1, 2]
    assert servers.search_order(ids[2]) == [2, 0, 1]
    # Of Sentinel the order of the hosts does not matter.
    tags = [
        load({"x": f"redis+sentinel://:hush@{hosts}/main/2"}).servers[1].tag for hosts in ("s1:1,s2:2", "s2:2,s1:1")
    ]
    assert tags[0] == tags[1] != load({"x": "redis+sentinel://s1:1,s2:2/main/3"}).servers[1].tag
    # The id does not change with the password, the options or the other models.
    assert load({"x": "redis://h2?socket_timeout=5"}).of_job(ids[2]) == 1


@pytest.mark.parametrize(
    ("urls", "says"),
    [
        ("{", "SCOREPOOL_REDIS_URLS: expected a JSON object"),
        ("[" * 100_000, "SCOREPOOL_REDIS_URLS: expected a JSON object"),
        ({"a": A.replace("redis", "REDIS")}, r"SCOREPOOL_REDIS_URLS\['a'\]: the Redis URL cannot be parsed"),
        ([A], "SCOREPOOL_REDIS_URLS: expected a JSON object"),
        ({"a": 1}, "whose values are texts"),
        (f'{{"a": "{A}", "a": "{B}"}}', "the model 'a' is given twice"),
        ({"a b": A}, "'a b' is no name of a model"),
        ({"webhooks": A}, "is the queue of deliveries"),
        ({"a": "http://:hush@h"}, r"SCOREPOOL_REDIS_URLS\['a'\]: the Redis URL cannot be parsed"),
        ({"a": A, "b": A.replace("hush", "hush2")}, "of 'a' and 'b' name one server and differ"),
    ],
)
def test_a_bad_map_is_refused(urls: object, says: str):
    with pytest.raises(SettingsError, match=says) as caught:
        load(urls)
    assert "hush" not in str(caught.value)


def test_a_worker_has_models_of_one_server():
    servers = load({"a": A, "b": B, "alias": B})
    assert servers.of_worker(["b", "alias"]).url == B
    assert servers.of_worker(["x"]).url == "redis://127.0.0.1:6379/0"
    for names in (["a", "b"], ["a", "x"]):
        with pytest.raises(SettingsError, match=f"puts 'a' and '{names[1]}' on two"):
            servers.of_worker(names)


def test_the_map_is_read_from_a_file(tmp_path: Path):
    path = tmp_path / "urls.json"
    path.write_text(json.dumps({"a": A}))
    environ = {"SCOREPOOL_REDIS_URLS_FILE": str(path)}
    assert ServerMap.load(Settings.load(environ)).of_model("a") == 1
    with pytest.raises(SettingsError, match="are both set"):
        Settings.load(environ | {"SCOREPOOL_REDIS_URLS": "{}"})
    path.chmod(0o666)
    with pytest.raises(SettingsError, match="every user may write to it"):
        Settings.load(environ)


def test_two_urls_of_one_redis_are_refused(redis_url: str, other_server: OtherServer, tmp_path: Path):
    link = tmp_path / "s"
    link.symlink_to(other_server.url.removeprefix("unix://"))
    settings = Settings(redis_url=redis_url, redis_urls=json.dumps({"a": other_server.url, "b": f"unix://{link}"}))
    with pytest.raises(SettingsError, match=r"\['b'\]: it leads to the same Redis as SCOREPOOL_REDIS_URLS\['a'\]"):
        asyncio.run(check_logins(ServerMap.load(settings)))
