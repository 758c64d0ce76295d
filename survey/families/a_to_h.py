"""Families from afmoe to hunyuan_v1_dense."""

from survey.families.family import Family

FAMILIES: tuple[Family, ...] = ()
