"""Published layouts of checkpoints from afmoe to hunyuan_v1_dense, where transformers saves another."""

from survey.families.family import Config, Weights


def without_prefix(config: Config, weights: Weights) -> None:
    """Name GPT-2's weights as its first release does. mlx-lm refuses those that begin with `transformer.`."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)
