"""The survey changes every setting, one at a time."""

from survey.mutations import Config, Mutator
from survey.own_settings import own_settings

CONFIG: Config = {
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def mutated(seed: int, own: Config | None = None) -> list[tuple[str, object]]:
    changes = Mutator(seed, defaults={}, own=own or {}, section="").mutations(CONFIG)
    return [(name, value) for name, value, _ in changes]


def test_every_setting_is_changed_and_alone():
    names = {name for name, _ in mutated(0)}
    assert names >= {
        "rms_norm_eps",
        "tie_word_embeddings",
        "num_attention_heads",
        "hidden_act",
        "rope_parameters.yarn.factor",
    }
    for name, value, changed in Mutator(0, {}, {}, "").mutations(CONFIG):
        differing = [key for key in changed if changed[key] != CONFIG.get(key)]
        assert len(differing) <= 1 or "max_position_embeddings" in differing, (name, value)


def test_another_seed_tries_other_numbers_and_the_same_words():
    fixed, drawn = mutated(0), mutated(5)
    assert [name for name, _ in fixed] == [name for name, _ in drawn]
    assert {value for name, value in fixed if name == "hidden_act"} == {
        value for name, value in drawn if name == "hidden_act"
    }
    assert dict(fixed)["rms_norm_eps"] != dict(drawn)["rms_norm_eps"]
    assert mutated(5) == drawn


def test_settings_that_mlx_lm_alone_knows_are_tried():
    own = own_settings({"model_type": "llama"})
    assert own["rope_traditional"] is False
    assert ("rope_traditional", True) in mutated(0, own)
    assert "rope_scaling" not in own


def test_settings_of_a_text_model_come_from_the_module_that_makes_it():
    assert "rope_traditional" in own_settings({"model_type": "mistral3"})
