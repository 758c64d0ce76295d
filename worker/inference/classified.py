"""Build the wire.Result of a classify job from sequences that are done. Pure."""

from collections.abc import Sequence as Items
from math import exp, fsum

from scorepool import wire
from scorepool.engine import Classifier
from scorepool.wire import Floats
from scorepool.worker.inference.prepared import PreparedSequence


def to_classified(prepared: Items[PreparedSequence], provenance: wire.Provenance) -> wire.Result:
    """Return the job's result. Raises ValueError for a sequence that was not classified."""
    computed = [each.sequence.model_info for each in prepared if each.failure is None]
    classifier = computed[-1].classifier if computed and computed[-1] else None
    if computed and classifier is None:
        raise ValueError("the sequences of a classify job were not computed by a classifier")
    num_tokens = sum(each.num_prompt_tokens for each in prepared)
    return wire.Result(
        sequences=[],
        labels=list(classifier.labels) if classifier else [],
        classifications=[_to_classification(each, classifier) for each in prepared],
        temperature=1.0,
        usage=wire.Usage(prompt_tokens=num_tokens, completion_tokens=0),
        stamp=provenance,
    )


def _to_classification(prepared: PreparedSequence, classifier: Classifier | None) -> wire.Classification:
    if prepared.failure is not None or classifier is None:
        return wire.Classification(label="", logits=Floats(), probs=None, num_tokens=0, failure=prepared.failure)
    logits = prepared.sequence.class_logits
    if logits is None:
        raise ValueError("a sequence of a classify job has no logits")
    labelled = zip(logits, classifier.labels, strict=True)
    return wire.Classification(
        label=max(labelled, key=lambda pair: pair[0])[1],
        logits=Floats(logits),
        probs=None if classifier.activation == "none" else Floats(probabilities(logits, classifier.activation)),
        num_tokens=prepared.num_prompt_tokens,
        truncated=prepared.num_truncated,
    )


def probabilities(logits: Items[float], activation: str) -> list[float]:
    """Return the softmax of finite logits, or the sigmoid of each."""
    if activation == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    largest = max(logits)
    weights = [exp(logit - largest) for logit in logits]
    total = fsum(weights)
    return [weight / total for weight in weights]


def _sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit)), without an exponent that overflows."""
    return 1 / (1 + exp(-logit)) if logit >= 0 else exp(logit) / (1 + exp(logit))
