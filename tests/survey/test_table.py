"""The findings of a survey become the table that the engine reads."""

from survey.run import Finding
from survey.table import fold


def finding(setting: str, value: object, outcome: str = "agrees", *, is_default: bool = False) -> Finding:
    return Finding("llama", "base", setting, value, is_default, matters=True, outcome=outcome, detail="")


def test_a_number_that_agrees_everywhere_is_followed_at_any_value():
    table = fold([finding("rms_norm_eps", 1e-6, is_default=True), finding("rms_norm_eps", 0.5)])
    assert table == {"followed": ["rms_norm_eps"], "excepted": {}, "only": {}, "not_by_default": []}


def test_a_number_that_differs_anywhere_is_followed_only_where_it_agreed():
    found = [finding("n_groups", 1, is_default=True), finding("n_groups", 2), finding("n_groups", 4, "differs")]
    assert fold(found) == {"followed": [], "excepted": {}, "only": {"n_groups": [1, 2]}, "not_by_default": []}


def test_a_value_that_differs_beside_one_base_is_not_followed_beside_another():
    found = [finding("n_groups", 2), finding("n_groups", 2, "crashes")]
    assert fold(found)["only"] == {"n_groups": []}


def test_what_the_engine_refuses_by_itself_needs_no_table():
    found = [finding("head_dim", 16), finding("head_dim", 15, "refused")]
    assert fold(found)["followed"] == ["head_dim"]


def test_a_word_is_followed_only_where_it_agreed_unless_any_word_does_or_a_rule_refuses_others():
    known = [finding("hidden_act", "silu", is_default=True), finding("hidden_act", "swish")]
    assert fold(known)["only"] == {"hidden_act": ["silu", "swish"]}
    by_rule = [*known, finding("hidden_act", "gelu", "refused")]
    assert fold(by_rule)["followed"] == ["hidden_act"]
    ignored = [finding("comment", "none", is_default=True), finding("comment", "unheard_of")]
    assert fold(ignored)["followed"] == ["comment"]


def test_a_default_that_differs_is_named():
    assert fold([finding("scale", 1.0, "differs", is_default=True)])["not_by_default"] == ["scale"]


def test_a_setting_for_which_nothing_was_tried_is_followed_only_where_it_is_unset():
    table = fold([finding("layer_types", None)])
    assert table == {"followed": [], "excepted": {}, "only": {"layer_types": [None]}, "not_by_default": []}


def test_a_single_expert_that_code_treats_apart_is_the_exception():
    found = [finding("experts", 8, is_default=True), finding("experts", 2), finding("experts", 1, "differs")]
    assert fold(found) == {"followed": [], "excepted": {"experts": [1]}, "only": {}, "not_by_default": []}
