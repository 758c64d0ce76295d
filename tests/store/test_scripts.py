"""Scripts get every key and field name from Python, and nothing outside store/ spells a key."""

import re
from pathlib import Path

import pytest

from scorepool import store, wire
from scorepool.store import scripts

LUA = sorted(path.name for path in (Path(__file__).parents[2] / "store" / "lua").glob("*.lua"))
KEY = re.compile(r"(?<![\w:/])(?:rq|scorepool):[a-z{]")


@pytest.mark.parametrize("name", LUA)
def test_a_script_uses_only_constants_that_are_defined_and_spells_no_key(name: str):
    assert scripts.unknown_constants(name) == set()
    assert not KEY.search(scripts._code(name))


def test_no_module_outside_store_spells_a_key(root: Path):
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for room in ("api", "worker", "wire", "engine")
        for path in sorted((root / room).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"f?b?[\"'](?:rq|scorepool):[a-z{]", line) and "noqa" not in line and "{error}" not in line
    ]
    assert found == []


def test_the_fields_that_scripts_read_of_a_subscriber_are_fields_of_the_struct():
    lua = scripts.load("outbox.lua")
    of_subscriber = set(re.findall(r"cjson\.decode\(text\)\.(\w+)", lua))
    of_endpoint = set(re.findall(r"\bendpoint\.(\w+)", lua))
    assert of_subscriber == {"endpoint"} <= {*wire.Subscriber.__struct_fields__}
    assert of_endpoint == {"id", "events", "disabled_at"} <= {*wire.WebhookEndpoint.__struct_fields__}


def test_the_field_that_scripts_read_of_an_outcome_is_a_field_of_a_failure():
    lua = scripts.load("end_job.lua")
    assert set(re.findall(r"\bfailure\.(\w+)", lua)) == {"code"} <= {*wire.Failure.__struct_fields__}


def test_the_default_prefix_gives_the_names_that_existing_data_has():
    assert store.Keys.request("1") == "scorepool:request:1"
    assert store.Keys.fair_share("demo") == "scorepool:turns:demo"
    assert store.Keys.wakeup("demo") == "scorepool:bell:demo"
    assert store.Keys.backlog("demo", "alice") == "scorepool:backlog:demo:alice"
    assert (store.TOKENS, store.DONE, store.WEBHOOKS) == ("scorepool:tokens", "scorepool:done", "webhooks")
    assert store.RqKeys.job("1") == "rq:job:1"
    assert store.queue_names("demo") == ["demo:high", "demo", "demo:low"]
