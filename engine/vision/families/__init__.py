"""Families of vision-language models: a module for each model_type; see ../family.py."""
