"""Families from afmoe to hunyuan_v1_dense."""

from survey.families import a_to_h_dense, a_to_h_experts, a_to_h_gemma, a_to_h_recurrent
from survey.families.family import Family

FAMILIES: tuple[Family, ...] = (
    *a_to_h_dense.FAMILIES,
    *a_to_h_experts.FAMILIES,
    *a_to_h_gemma.FAMILIES,
    *a_to_h_recurrent.FAMILIES,
)
