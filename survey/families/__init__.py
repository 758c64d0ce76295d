"""Tiny configurations of the families that both mlx-lm and transformers know.

To add one, add it to the module of its first letter and kind.
"""

from survey.families import a_to_h, i_to_z, i_to_z_experts, i_to_z_multimodal, i_to_z_recurrent
from survey.families.family import Family

_MODULES = (a_to_h, i_to_z, i_to_z_experts, i_to_z_multimodal, i_to_z_recurrent)

FAMILIES: dict[str, Family] = {family.model_type: family for module in _MODULES for family in module.FAMILIES}
