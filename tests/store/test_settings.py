import pytest

from scorepool import store


def test_settings_are_read_from_their_variables_whatever_the_case_of_the_level():
    settings = store.Settings.load({"SCOREPOOL_PORT": "81", "SCOREPOOL_LOG_LEVEL": "debug", "OTHER": "x"})
    assert (settings.port, settings.log_level) == (81, "DEBUG")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"SCOREPOOL_PROT": "1"}, "SCOREPOOL_PROT is not a setting; did you mean SCOREPOOL_PORT?"),
        ({"SCOREPOOL_PORT": "x"}, "SCOREPOOL_PORT='x': expected a whole number"),
        ({"SCOREPOOL_LEASE_S": "x"}, "SCOREPOOL_LEASE_S='x': expected a number"),
        ({"SCOREPOOL_PORT": "65536"}, "SCOREPOOL_PORT='65536': Expected `int` <= 65535"),
        ({"SCOREPOOL_LOG_LEVEL": "loud"}, "SCOREPOOL_LOG_LEVEL='LOUD': expected one of CRITICAL, DEBUG, "),
        ({"SCOREPOOL_LOG_FORMAT": "yaml"}, "SCOREPOOL_LOG_FORMAT='yaml': expected one of json, text"),
        ({"SCOREPOOL_WEBHOOK_ALLOW_PRIVATE": "maybe"}, "ALLOW_PRIVATE='maybe': expected true or false"),
        ({"SCOREPOOL_LEASE_S": "nan"}, "SCOREPOOL_LEASE_S='nan'"),
    ],
)
def test_a_typo_stops_the_start(environ: dict[str, str], says: str):
    with pytest.raises(store.SettingsError) as caught:
        store.Settings.load(environ)
    assert says in str(caught.value)


def test_a_secret_is_not_repeated_when_its_variable_is_refused():
    with pytest.raises(store.SettingsError) as caught:
        store.Settings.load({"SCOREPOOL_WEBHOOK_SECERT": "whsec_hush"})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["demo", "demo=", "=x", "a b=x", "a:high=x", "webhooks=x", "a,=x", "a,a=x", "a,webhooks=x"]
)
def test_a_model_is_name_and_source(spec: str):
    with pytest.raises(store.SettingsError):
        store.parse_model(spec)
    assert store.parse_model("qwen/3=/models/q=3") == (["qwen/3"], "/models/q=3")
    assert store.parse_model("a,b/c=x") == (["a", "b/c"], "x")


@pytest.mark.parametrize("spec", ["a", "a=", "=x", "a,b=x", "a=x;a=y", "a=x;"])
def test_a_draft_is_one_source_for_each_name(spec: str):
    with pytest.raises(store.SettingsError):
        store.parse_drafts(spec)
    assert store.parse_drafts("") == {}
    assert store.parse_drafts("a=/models/x y;b/c=z=1") == {"a": "/models/x y", "b/c": "z=1"}
