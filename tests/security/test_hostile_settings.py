"""A setting with a hostile value is refused with one short sentence."""

import pytest

from scorepool.store import Settings, SettingsError

VALUES = ["\udcff", "x" * 100_000, "9" * 5000, "\0", "\n", "-1"]
ANYTHING = {"api_keys", "api_keys_file", "client_key", "host", "model", "redis_url", "redis_url_file", "state_dir"}
ANYTHING |= {
    "adapters",
    "drafts",
    "models",
    "redis_urls",
    "redis_urls_file",
    "result_store",
    "uds",
    "url",
    "api_key",
    "certificate_dir",
    "webhook_secret",
}  # what reads them checks them


MEANT = {("max_top_logprobs", "-1")}  # values that are none too hostile: no cap
CASES = [(name, value) for name in sorted({*Settings.__struct_fields__} - ANYTHING) for value in VALUES]


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if case not in MEANT])
def test_a_hostile_value_is_refused_with_one_sentence(name: str, value: str):
    with pytest.raises(SettingsError) as caught:
        Settings.load({f"SCOREPOOL_{name.upper()}": value})
    assert f"SCOREPOOL_{name.upper()}=" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("names", [",", "alice,", "alice bob", "-a", "alice;bob", " "])
def test_names_that_no_key_can_have_may_not_use_high(names: str):
    """Without a name everybody may use `high`."""
    with pytest.raises(SettingsError, match="SCOREPOOL_HIGH_PRIORITY_KEYS"):
        Settings.load({"SCOREPOOL_HIGH_PRIORITY_KEYS": names})
