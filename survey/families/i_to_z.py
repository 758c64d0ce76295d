"""Families from jamba to zamba."""

from survey.families.family import Family

FAMILIES: tuple[Family, ...] = (
    Family("llama", {"head_dim": 16}),
    Family("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    Family("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "expand": 2, "chunk_size": 16}),
)
