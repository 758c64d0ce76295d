"""Tiny configurations of the families that both mlx-lm and transformers know.

To add one, add it to the module of its first letter.
"""

from survey.families import a_to_h, i_to_z
from survey.families.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*a_to_h.FAMILIES, *i_to_z.FAMILIES)}
