"""Published layouts of checkpoints from afmoe to hunyuan_v1_dense, where transformers saves another."""

from survey.families.family import Config, Weights


def without_prefix(config: Config, weights: Weights) -> None:
    """Name GPT-2's weights as its first release does. mlx-lm refuses those that begin with `transformer.`."""
    for name in list(weights):
        weights[name.removeprefix("transformer.")] = weights.pop(name)


def split_interleaved_experts(config: Config, weights: Weights) -> None:
    """Write gpt-oss's experts as mlx-lm's converter does.

    transformers interleaves gate and up, and names unquantised experts without `.weight`. OpenAI's files are mxfp4.
    """
    for name in list(weights):
        experts, _, last = name.rpartition(".")
        if not experts.endswith("experts"):
            continue
        weight, kind = weights.pop(name), "bias" if last.endswith("bias") else "weight"
        weight = weight if kind == "bias" else weight.transpose(-1, -2)
        if last.startswith("down"):
            weights[f"{experts}.down_proj.{kind}"] = weight
            continue
        halves = (weight[:, start::2] for start in (0, 1))
        for projection, half in zip(("gate_proj", "up_proj"), halves, strict=True):
            weights[f"{experts}.{projection}.{kind}"] = half
