"""No configuration that transformers or the survey knows is refused as a contradiction."""

import pkgutil

import mlx_lm.models
import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from scorepool.engine import LoadError
from scorepool.engine.model.contradictions import refuse_contradictions
from scorepool.engine.model.surveyed import canonical_config
from survey.families import FAMILIES

ARCHITECTURES = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)}


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES & CONFIG_MAPPING_NAMES.keys()))
def test_the_defaults_of_an_architecture_are_no_contradiction(model_type: str):
    refuse_contradictions(AutoConfig.for_model(model_type).to_dict())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_surveyed_configurations_are_no_contradiction(name: str):
    for config in FAMILIES[name].bases().values():
        refuse_contradictions(config)
        refuse_contradictions(canonical_config(config) or config)


def test_layers_may_have_a_head_dim_of_0_where_latent_attention_has_its_own():
    refuse_contradictions({"model_type": "glm5", "kv_lora_rank": 8, "head_dim": 0})


def test_more_local_blocks_than_chosen_blocks_of_sparse_attention_are_a_contradiction():
    config = {"model_type": "minimax_m3_vl", "text_config": {"index_topk_blocks": 2, "index_local_blocks": 4}}
    with pytest.raises(LoadError, match=r"text_config\.index_local_blocks is 4, expected at most index_topk_blocks"):
        refuse_contradictions(config)


def test_the_base_of_each_layer_may_be_in_a_list():
    refuse_contradictions({"model_type": "step3p5", "rope_theta": [5_000_000.0, 10_000.0]})
    with pytest.raises(LoadError, match=r"rope_theta is -1\.0, expected a finite number above 0"):
        refuse_contradictions({"model_type": "step3p5", "rope_theta": [5_000_000.0, -1.0]})
