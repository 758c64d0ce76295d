"""Check what sequences ask for. Runs in the caller's thread, before they wait for anything."""

from math import inf, isfinite

from scorepool.engine.errors import ContextLengthExceeded, DraftContextExceeded, InvalidRequest
from scorepool.engine.model_info import ModelInfo
from scorepool.engine.sequence import Sampling, Sequence, Targets


def check(sequences: list[Sequence], model_info: ModelInfo) -> None:
    """Check a group; raise InvalidRequest or ContextLengthExceeded with the sequence, the value and the expectation."""
    if not sequences:
        raise InvalidRequest("the group has no sequences; expected at least one")
    if len(set(sequences)) != len(sequences):
        raise InvalidRequest("the group holds the same Sequence twice; expected a new object for each")
    for number, sequence in enumerate(sequences):
        where = f"sequence {number}" if len(sequences) > 1 else "the sequence"
        _check_tokens(sequence, where, model_info)
        _check_report(sequence, where, model_info)
        if sequence.images:
            _check_images(sequence, where, model_info)
        if sequence.sampling is not None:
            _check_sampling(sequence.sampling, where, model_info)
        _check_length(sequence, where, model_info)


def _check_tokens(sequence: Sequence, where: str, model_info: ModelInfo) -> None:
    if sequence.num_computed or sequence.columns or len(sequence.token_ids) != sequence.num_input_tokens:
        raise InvalidRequest(f"{where} was run before; expected a new Sequence")
    if not sequence.token_ids:
        raise InvalidRequest(f"{where} has no tokens; expected at least one (BOS if there is nothing else)")
    lowest, highest = min(sequence.token_ids), max(sequence.token_ids)
    if lowest < 0 or highest >= model_info.vocab_size:
        bad = lowest if lowest < 0 else highest
        position = sequence.token_ids.index(bad)
        raise InvalidRequest(
            f"{where} has token id {bad} at position {position}; "
            f"expected ids from 0 to {model_info.vocab_size - 1}, the model's vocabulary"
        )


def _check_report(sequence: Sequence, where: str, model_info: ModelInfo) -> None:
    if sequence.classify != (model_info.classifier is not None):
        raise InvalidRequest(
            f"{where} is to be classified; expected logprobs: the model is a language model, without a head that "
            "classifies"
            if sequence.classify
            else f"{where} asks for logprobs; expected to be classified: the model has no head but its classifier's"
        )
    if sequence.classify:
        _check_classified(sequence, where)
        return
    if sequence.pooling is not None:
        _check_embedded(sequence, where, model_info)
        return
    if sequence.score_from is None and sequence.sampling is None:
        raise InvalidRequest(f"{where} asks for nothing; expected score_from, sampling or both")
    if sequence.score_from is not None and not 0 <= sequence.score_from <= sequence.num_input_tokens:
        raise InvalidRequest(f"{where} has score_from {sequence.score_from}; expected 0 to {sequence.num_input_tokens}")
    if not 0 <= sequence.top_logprobs <= model_info.vocab_size:
        raise InvalidRequest(f"{where} has top_logprobs {sequence.top_logprobs}; expected 0 to {model_info.vocab_size}")
    if sequence.targets is not None:
        _check_targets(sequence, sequence.targets, where, model_info)
    if not 0 < sequence.temperature < inf:
        raise InvalidRequest(f"{where} has temperature {sequence.temperature}; expected a finite value above 0")
    if sequence.reports_proposals and model_info.speculation not in ("ngram", "draft", "mtp"):
        raise InvalidRequest(
            f"{where} asks for the logprobs of proposed tokens; expected a model that is served with speculation: "
            f"this one's is {model_info.speculation!r}"
        )
    if sequence.speculation is not None and sequence.speculation not in model_info.speculations:
        raise InvalidRequest(
            f"{where} has speculation {sequence.speculation!r}; expected {' or '.join(model_info.speculations)}, which "
            "this engine has"
        )
    if sequence.speculation_tokens is not None and sequence.speculation_tokens < 1:
        raise InvalidRequest(f"{where} has speculation_tokens {sequence.speculation_tokens}; expected 1 or more")
    if sequence.keep_pct is not None:
        _check_kept(sequence, sequence.keep_pct, where, model_info)
    if sequence.processed and sequence.sampling is not None and not sequence.sampling.temperature:
        raise InvalidRequest(f"{where} has processed logprobs and sampling temperature 0; expected one above 0")


def _check_kept(sequence: Sequence, keep_pct: float, where: str, model_info: ModelInfo) -> None:
    if model_info.whole_prompts is not None:
        raise InvalidRequest(
            f"{where} has keep_pct {keep_pct}; expected none, so that its whole prompt is computed: "
            f"{model_info.whole_prompts}"
        )
    if sequence.sampling is None or sequence.score_from is not None:
        raise InvalidRequest(
            f"{where} has keep_pct {keep_pct}; expected none, because the tokens of its prompt are scored: "
            "each needs all tokens before it"
        )
    if not 1 <= keep_pct <= 100:
        raise InvalidRequest(f"{where} has keep_pct {keep_pct}; expected 1 to 100, percent of the prompt")
    if sequence.speculation not in (None, "off"):
        raise InvalidRequest(
            f"{where} has keep_pct beside speculation {sequence.speculation!r}; expected 'off': a row with a part of "
            "its prompt proposes nothing"
        )
    if sequence.num_input_tokens > model_info.draft_context_length:
        raise DraftContextExceeded(
            f"{where} has {sequence.num_input_tokens} tokens; the context of the draft model, which says what to keep, "
            f"is {model_info.draft_context_length} tokens"
        )


def _check_images(sequence: Sequence, where: str, model_info: ModelInfo) -> None:
    if model_info.images is None:
        reason = model_info.images_unsupported or "it is a model of texts"
        raise InvalidRequest(f"{where} shows images; expected none: {reason}")
    if sequence.adapter_name is not None:
        raise InvalidRequest(f"{where} shows images and names an adapter; expected one of both")
    if sequence.pooling is not None:
        raise InvalidRequest(f"{where} shows images and is to be embedded; expected one of both")
    if sequence.keep_pct is not None:
        raise InvalidRequest(f"{where} shows images and has keep_pct {sequence.keep_pct}; expected one of both")
    end = max(image.end for image in sequence.images)
    if sequence.score_from is not None and sequence.score_from < end:
        raise InvalidRequest(
            f"{where} has score_from {sequence.score_from}; expected {end} or more: the tokens of images have no "
            "logprobs"
        )
    if (reached := sequence.max_positions) > model_info.context_length:
        raise ContextLengthExceeded(
            f"{where} shows a video whose times make it take {reached} positions; this model's context is "
            f"{model_info.context_length}: a higher `fps` or fewer frames take less"
        )


def _check_classified(sequence: Sequence, where: str) -> None:
    if sequence.score_from is not None or sequence.sampling is not None or sequence.class_logits is not None:
        raise InvalidRequest(f"{where} is to be classified; expected no score_from, no sampling and a new Sequence")


def _check_embedded(sequence: Sequence, where: str, model_info: ModelInfo) -> None:
    if model_info.pooling is None:
        raise InvalidRequest(f"{where} is to be embedded; expected logprobs: this model makes no embeddings")
    if sequence.score_from is not None or sequence.sampling is not None or sequence.embedding is not None:
        raise InvalidRequest(f"{where} is to be embedded; expected no score_from, no sampling and a new Sequence")


def _check_targets(sequence: Sequence, targets: Targets, where: str, model_info: ModelInfo) -> None:
    num_reported = sequence.num_input_tokens - sequence.first_reported
    if not targets.is_shared and (sequence.sampling is not None or len(targets.lists) != num_reported):
        raise InvalidRequest(
            f"{where} has {len(targets.lists)} lists of targets; expected one for each of its {num_reported} reported "
            "tokens, and none generated"
        )
    for entry, ids in enumerate(targets.lists):
        if any(not 0 <= token_id < model_info.vocab_size for token_id in ids):
            bad = next(token_id for token_id in ids if not 0 <= token_id < model_info.vocab_size)
            raise InvalidRequest(
                f"{where} has target {bad} in list {entry}; expected ids from 0 to {model_info.vocab_size - 1}"
            )


def _check_sampling(sampling: Sampling, where: str, model_info: ModelInfo) -> None:
    limits = {
        "max_tokens at least 1": sampling.max_tokens >= 1,
        "temperature 0 or more, and finite": 0 <= sampling.temperature < inf,
        "top_p above 0 and up to 1": 0 < sampling.top_p <= 1,
        "top_k 0 or more": sampling.top_k >= 0,
        "min_p from 0 to 1": 0 <= sampling.min_p <= 1,
        "seed from 0 to 2**64 - 1": sampling.seed is None or 0 <= sampling.seed < 2**64,
        "presence_penalty a finite number": isfinite(sampling.presence_penalty),
        "frequency_penalty a finite number": isfinite(sampling.frequency_penalty),
        "repetition_penalty above 0, and finite": 0 < sampling.repetition_penalty < inf,
        f"logit_bias of finite numbers for token ids from 0 to {model_info.vocab_size - 1}": all(
            0 <= token_id < model_info.vocab_size and isfinite(bias) for token_id, bias in sampling.logit_bias
        ),
        "stop without empty strings": all(sampling.stop),
        f"stop_token_ids from 0 to {model_info.vocab_size - 1}": all(
            0 <= token_id < model_info.vocab_size for token_id in sampling.stop_token_ids
        ),
        f"allowed_bitmask of 32-bit words and of token ids from 0 to {model_info.vocab_size - 1}": (
            len(sampling.allowed_bitmask) % 4 == 0
            and int.from_bytes(sampling.allowed_bitmask, "little").bit_length() <= model_info.vocab_size
        ),
        f"bad_words of one token id or more from 0 to {model_info.vocab_size - 1}": all(
            word and min(word) >= 0 and max(word) < model_info.vocab_size for word in sampling.bad_words
        ),
        f"min_tokens from 0 to max_tokens, {sampling.max_tokens}": 0 <= sampling.min_tokens <= sampling.max_tokens,
    }
    for expected, is_met in limits.items():
        if not is_met:
            name = expected.split()[0]
            raise InvalidRequest(f"{where} has sampling {name} {getattr(sampling, name)!r:.80}; expected {expected}")


def _check_length(sequence: Sequence, where: str, model_info: ModelInfo) -> None:
    max_new_tokens = sequence.max_length - sequence.num_input_tokens
    limits = {
        "this model's context is": model_info.context_length,
        "the memory of this worker holds a KV cache of": model_info.max_cached_tokens,
    }
    for limit, num_tokens in limits.items():
        if sequence.max_length > num_tokens:
            raise ContextLengthExceeded(
                f"{where} has {sequence.num_input_tokens} tokens and may generate {max_new_tokens} more; "
                f"{limit} {num_tokens} tokens, prompt and completion together"
            )
