"""Score pairs of a query and a document: by a classifier of one label, or by how likely a reranker says yes. Pure.

A classifier reads the query and the document one after the other, as one text. A language model reads them in the
format of Qwen3-Reranker, and its score is P(yes) / (P(yes) + P(no)) of the answer's first token (the model card of
Qwen3-Reranker-0.6B).
"""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scorepool import wire
from scorepool.api.dialects import classify_jobs
from scorepool.api.dialects.protocol import Context
from scorepool.api.dialects.truncation import TruncationFields

MAX_CHARACTERS = 2**25  # of one request: a query is repeated for each document
_ANSWERS = ("no", "yes")
_MARK = "<|im_start|>"  # a token of the models that know the format
_FORMAT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Pair(NamedTuple):
    query: str
    document: str


def texts_to_encode(served_model: wire.ServedModel) -> Sequence[str]:
    """Return the texts whose token ids `to_requests` needs."""
    return () if served_model.classifier else (*_ANSWERS, _MARK)


def to_requests(
    pairs: Sequence[Pair],
    instruction: str | None,
    priority: wire.Priority,
    cache_salt: str | None,
    context: Context,
    field: str,
    truncation: TruncationFields,
) -> Iterator[wire.Request]:
    """Yield the jobs of the pairs, whose documents are `field` of the body.

    Raise wire.Invalid if the pairs are too large together, or if the model does not score pairs.
    """
    served_model = context.served_model
    assert served_model is not None
    num_characters = sum(len(pair.query) + len(pair.document) for pair in pairs)
    if num_characters > MAX_CHARACTERS:
        found = f"expected pairs of at most {MAX_CHARACTERS} characters together, found {num_characters}"
        raise wire.Invalid(f"{field}: {found}; send several requests", field)
    if served_model.classifier is None:
        if truncation["truncate"] is not None:
            name = "truncate_prompt_tokens"
            raise wire.Invalid(
                f"{name}: it would cut the format of a reranker that says yes or no; expected null", name
            )
        yield from _yes_or_no_jobs(pairs, instruction, priority, cache_salt, context, served_model.id)
        return
    classify_jobs.check_one_label(served_model)
    if instruction is not None:
        raise wire.Invalid("instruction: a classifier reads none; expected null", "instruction")
    items = (wire.ClassifyItem(prompt=pair.query + pair.document) for pair in pairs)
    yield from classify_jobs.to_classify_jobs(
        items,
        served_model.id,
        context.timeout_s,
        add_special_tokens=True,
        priority=priority,
        cache_salt=cache_salt,
        truncation=truncation,
    )


def _yes_or_no_jobs(
    pairs: Sequence[Pair],
    instruction: str | None,
    priority: wire.Priority,
    cache_salt: str | None,
    context: Context,
    model: str,
) -> Iterator[wire.Generate]:
    if any(len(token_ids) != 1 for token_ids in context.encoded_texts):
        raise wire.Invalid(
            f"model: expected a classifier of one label, or a reranker that answers yes or no in the format of "
            f"Qwen3-Reranker, found {model!r}, for which {_MARK}, yes and no are not one token each",
            "model",
        )
    answer_ids = [token_ids[0] for token_ids in context.encoded_texts[: len(_ANSWERS)]]
    for pair in pairs:
        prompt = _FORMAT.format(
            instruction=_INSTRUCTION if instruction is None else instruction,
            query=pair.query,
            document=pair.document,
        )
        yield wire.Generate(
            model=model,
            priority=priority,
            timeout_s=context.timeout_s,
            cache_salt=cache_salt,
            prompt=prompt,
            add_bos=False,
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs_mode="raw_logprobs",
            targets=answer_ids,
        )


def scores(results: Sequence[wire.Result], use_activation: bool | None) -> list[float]:
    """Return a score for each pair: a probability, or without `use_activation` its logit."""
    if any(result.classifications for result in results):
        found = classify_jobs.classifications(results)
        return [float((one.logits if use_activation is False or one.probs is None else one.probs)[0]) for one in found]
    return [_yes_score(result, use_activation) for result in results]


def _yes_score(result: wire.Result, use_activation: bool | None) -> float:
    [sequence] = result.sequences
    assert sequence.target_logprobs is not None
    no, yes = map(float, sequence.target_logprobs[0])
    logit = yes - no
    if use_activation is False:
        return logit
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


_PROMPT = re.compile(r"(?:\[(?P<index>\d+)\]\.)?prompt")


def find_pair(field: str) -> int | None:
    """Return the index of the pair that a field of the jobs belongs to; None if it is none's."""
    if found := classify_jobs.find_item(field):
        return found[0]
    match = _PROMPT.fullmatch(field)
    return match and int(match["index"] or 0)
