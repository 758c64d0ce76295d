"""Recognise the checkpoint of a classifier, a `...ForSequenceClassification` of transformers, and load its head.

Its body is that of a language model. In the place of the language model's head it has a matrix [labels, width] without
bias, which is applied to the hidden state of the last token that is not padding. mlx-lm knows no such checkpoints: it
loads the body with the embeddings as its head. No token's logits are ever reported; the self-test compares them, for
they are as many numbers as there are tokens, where a head of one label has one number.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from scorepool.engine.errors import LoadError, as_load_error
from scorepool.engine.model.backbone import BackboneAndHead, FullLogits
from scorepool.engine.model_info import Activation, Classifier

Config = dict[str, Any]

_SUFFIX = "ForSequenceClassification"
# By model type: what transformers' class is called before the suffix. tests/engine/test_classifiers.py compares each.
_PREFIXES = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt2": "GPT2",
    "gpt_bigcode": "GPTBigCode",
    "gpt_oss": "GptOss",
    "helium": "Helium",
    "hunyuan_v1_dense": "HunYuanDenseV1",
    "jamba": "Jamba",
    "llama": "Llama",
    "minicpm3": "MiniCPM3",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi": "Phi",
    "phi3": "Phi3",
    "phimoe": "Phimoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
}
COMPARED_BODIES = frozenset(_PREFIXES)  # model types whose last hidden states are compared with transformers'
_HEAD = "score."  # what the names of the head's tensors begin with
_WEIGHT = "score.weight"
_LM_HEAD = "lm_head."
_EMBEDDINGS = "model.embed_tokens."
_PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification", None)
_DEFAULT_NUM_LABELS = 2  # of a configuration that has neither id2label nor num_labels, in transformers


def is_classifier(config: Config) -> bool:
    """True if the checkpoint is a classifier's, by its `architectures`. Raises LoadError for one that is not known."""
    names = [name for name in config.get("architectures") or () if str(name).endswith(_SUFFIX)]
    if not names:
        return False
    found, model_type = config["architectures"], config["model_type"]
    if model_type not in _PREFIXES:
        known = ", ".join(_PREFIXES)
        raise LoadError(
            f"config.json: architectures is {found!r:.200}, a classifier with the body of {model_type}, expected one "
            f"with a body of {known}"
        )
    expected = [_PREFIXES[model_type] + _SUFFIX]
    if found != expected:
        raise LoadError(
            f"config.json: architectures is {found!r:.200}, expected {expected} where model_type is {model_type}"
        )
    return True


def read_classifier(config: Config) -> Classifier:
    """Return the labels of a classifier and what becomes of their logits. Raises LoadError."""
    labels = _labels(config)
    problem_type = config.get("problem_type")
    if problem_type not in _PROBLEM_TYPES:
        names = ", ".join(str(name) for name in _PROBLEM_TYPES if name)
        raise LoadError(f"config.json: problem_type is {problem_type!r:.100}, expected {names} or null")
    activation: Activation = "softmax" if len(labels) > 1 else "sigmoid"
    if problem_type == "regression":
        activation = "none"
    elif problem_type == "multi_label_classification":
        activation = "sigmoid"
    pad_id = config.get("pad_token_id")
    return Classifier(labels=labels, activation=activation, pad_id=pad_id if isinstance(pad_id, int) else None)


def _labels(config: Config) -> tuple[str, ...]:
    """Return the names of the labels in the order of the head's rows. Raises LoadError."""
    names, num_labels = config.get("id2label"), config.get("num_labels")
    if names is None:
        num_labels = _DEFAULT_NUM_LABELS if num_labels is None else num_labels
        if not isinstance(num_labels, int) or num_labels < 1:
            raise LoadError(f"config.json: num_labels is {num_labels!r:.100}, expected a number of at least 1")
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    expected = {str(index) for index in range(len(names))} if isinstance(names, dict) else set()
    if not expected or names.keys() != expected:
        raise LoadError(f"config.json: id2label is {names!r:.200}, expected the name of each label by its number")
    return tuple(str(names[str(index)]) for index in range(len(names)))


def body_class(model_class: Any) -> Any:
    """Return mlx-lm's class for the body of a classifier. It takes the embeddings for the head that it would have."""

    def sanitize(self: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        weights = {name: weight for name, weight in weights.items() if not name.startswith((_HEAD, _LM_HEAD))}
        embeddings = {name: weight for name, weight in weights.items() if name.startswith(_EMBEDDINGS)}
        own: dict[str, mx.array] = dict(tree_flatten(self.parameters()))
        if f"{_LM_HEAD}weight" in own:
            weights |= {_LM_HEAD + name.removeprefix(_EMBEDDINGS): weight for name, weight in embeddings.items()}
        if f"{_LM_HEAD}bias" in own:
            weights[f"{_LM_HEAD}bias"] = mx.zeros_like(own[f"{_LM_HEAD}bias"])
        if hasattr(model_class, "sanitize"):
            weights = model_class.sanitize(self, weights)
        return weights

    return type(model_class.__name__, (model_class,), {"__module__": model_class.__module__, "sanitize": sanitize})


def load_head(stored: dict[str, mx.array], classifier: Classifier, split: BackboneAndHead) -> mx.array:
    """Return the head [labels, width] in float32, and try it. Raises LoadError. `stored` has the tensors by name."""
    if isinstance(split, FullLogits):
        raise LoadError("the hidden states of this model cannot be read, which its classification head needs")
    names = sorted(name for name in stored if name.startswith(_HEAD))
    if names != [_WEIGHT]:
        raise LoadError(f"the checkpoint's classification head has the tensors {names}, expected {[_WEIGHT]}")
    weight = stored[_WEIGHT]
    num_labels = len(classifier.labels)
    if weight.ndim != 2 or weight.shape[0] != num_labels:
        raise LoadError(
            f"the checkpoint's {_WEIGHT} has the shape {weight.shape}, expected {num_labels} rows: one for each label "
            "of config.json's id2label"
        )
    head = weight.astype(mx.float32)
    if not mx.isfinite(head).all().item() or not head.any(axis=1).all().item():
        raise LoadError(f"the checkpoint's {_WEIGHT} has a row of zeros, or numbers that are not finite")
    with as_load_error(f"the checkpoint's {_WEIGHT} does not fit the model"):
        mx.eval(compute_logits(split.forward_hidden(mx.array([[0]]))[0], head))
    return head


def compute_logits(rows: mx.array, head: mx.array) -> mx.array:
    """Return the logits [n, labels] in float32 of hidden states [n, width]."""
    return rows.astype(mx.float32) @ head.T
