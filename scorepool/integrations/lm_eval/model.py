"""The harness's requests as jobs.

Encoding, truncation and choice of the prefix token are those of the harness's HF model, so that both give the same
answers for the same weights.

    encode texts ──► token ids ──► truncate from the left ──► divide into jobs ──► gather ──► answers
"""

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from scorepool import wire
from scorepool.integrations.lm_eval.arguments import ArgumentError, check_names, number
from scorepool.integrations.lm_eval.jobs import run
from scorepool.integrations.lm_eval.tokenizers import LocalTokenizer, ServerTokenizer, Tokenizer, check_same
from scorepool.options import JobOptions
from scorepool.sdk import Client, MixedResults

logger = logging.getLogger(__name__)
ITEMS_PER_JOB = 256
TOKENS_PER_JOB = 131_072  # minutes of work; a job that its worker loses begins again
JOB_TIMEOUT_S = 86_400
RETRY_S = 3600.0  # for which the API may be away
TOKENS_SHOWN = 16  # of a context, in an error
MAX_STOP_STRINGS, MAX_STOP_STRING_LENGTH = 64, 1024  # that a job takes
SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
}
Window = tuple[list[int], list[int]]  # token ids of a context and of the continuation that is scored


class NotServed(ArgumentError):
    """No live worker serves the model."""


@register_model("scorepool")
class ScorepoolLM(TemplateLM):
    """A model that scorepool serves.

    `base_url` and `api_key` are read from SCOREPOOL_URL and SCOREPOOL_API_KEY if they are not given; lm_eval writes
    arguments into its results, so give the key in the environment. `tokenizer` is a folder or an id of the hub;
    without it, the server encodes the texts.
    `max_length` is the HF model's: a window has one token more, which the model predicts and does not read. The
    other arguments have the HF model's meaning; `batch_size`, `max_batch_size` and `device` have none here.
    """

    def __init__(
        self,
        model: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        priority: wire.Priority = "normal",
        max_in_flight: int = 64,
        retry_s: float = RETRY_S,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **unknown: Any,
    ) -> None:
        """Raises ArgumentError; NotServed if no live worker serves the model; Unreachable, ScorepoolError."""
        super().__init__()
        del batch_size, max_batch_size, device
        check_names(unknown, [name for name in inspect.signature(ScorepoolLM).parameters if name != "unknown"])
        if model is None:
            raise ArgumentError("model_args: expected model=NAME, a name that GET /v1/models lists")
        number("retry_s", retry_s, 0)
        number("max_in_flight", max_in_flight, 1)
        number("max_gen_toks", max_gen_toks, 1)
        self._client = Client(base_url, api_key, retry_s=retry_s)
        served = self._find(model)
        self.model = model
        self.stamp = served[0].stamp_of(model)
        self._max_in_flight = max_in_flight
        self._job_options = JobOptions(priority=priority, timeout_s=JOB_TIMEOUT_S, wait_for_model=True)
        most = min(worker.context_length for worker in served) - 1  # the server counts the last token of a window too
        self.max_length = most if max_length is None else max_length
        number("max_length", self.max_length, 1, most)
        self.max_gen_toks = max_gen_toks
        self.tokenizer = self._load_tokenizer(tokenizer, add_bos_token)
        self._add_bos = True if add_bos_token is None else add_bos_token
        self._prefix_token_id = prefix_token_id
        self._prefix = self.tokenizer.token(self.prefix_token_id)
        self._thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._template_args = (chat_template_args or {}) | self._thinking
        self._think_end_token = think_end_token

    def _find(self, name: str) -> list[wire.ServedModel]:
        """Return the live workers that serve a model. Raises NotServed."""
        served = self._client.models()
        if found := [worker for worker in served if name in worker.names]:
            return found
        names = ", ".join(sorted({worker.id for worker in served})) or "no model"
        raise NotServed(f"model={name}: {self._client.url} serves {names}")

    def _load_tokenizer(self, name: str | None, add_bos: bool | None) -> Tokenizer:
        if name is None:
            if add_bos:
                raise ArgumentError("add_bos_token=True needs tokenizer=, a folder or an id of the hub")
            return self._server_tokenizer()
        options = {} if add_bos is None else {"add_bos_token": add_bos}
        tokenizer = LocalTokenizer(name, **options)
        check_same(tokenizer, self._server_tokenizer())
        return tokenizer

    def _server_tokenizer(self) -> ServerTokenizer:
        return ServerTokenizer(self._client, self.model, self._job_options, self._max_in_flight)

    # What the harness asks about a model.

    @property
    def eot_token_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer of {self.model} has neither BOS nor EOS: give prefix_token_id=")
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        for token_id in (self._prefix_token_id, self.tokenizer.bos_token_id):
            if token_id is not None:
                return token_id
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what the harness writes into its results: what computed them."""
        return {
            "model_dtype": self.stamp.dtype,
            "model_fingerprint": self.stamp.fingerprint,
            "model_quantization": self.stamp.quantization,
            "model_adapter": self.stamp.adapter,
            "model_backend": self.stamp.backend,
            "model_versions": self.stamp.versions,
        }

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt of a chat. A template that refuses system messages gets none, as with the HF model."""
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.tokenizer.render(chat_history, **options, **self._template_args)
        except TemplateError:
            without = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.render(without, **options, **self._template_args)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._encode([string], add_special_tokens)[0]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool | None = None) -> list[list[int]]:
        """Return the token ids of texts. A text that begins with the prefix token gets no other one."""
        if add_special_tokens is None:
            add_bos = [self._add_bos and not text.startswith(self._prefix) for text in texts]
        else:
            add_bos = [add_special_tokens] * len(texts)
        return self.tokenizer.encode(texts, add_bos)

    # loglikelihood

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the logprob of each continuation, and whether it is the greedy one.

        Raises ArgumentError for a continuation that has no token or more than `max_length`.
        """
        if self._thinking.get("enable_thinking"):
            raise ValueError("enable_thinking=True: the harness has no thinking in tasks that compare loglikelihoods")
        pairs = [request.args for request in requests]
        windows = [((*pair,), *window) for pair, window in zip(pairs, self._encode_pairs(pairs), strict=True)]
        return self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)

    def _encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Window]:
        """Return the tokens of each context alone, and those of both texts together after as many.

        If a token spans the boundary, it is in neither, as with the HF model.
        Spaces at the end of a context belong to the continuation. Without a context, the prefix token is the context.
        """
        contexts = [context.rstrip() for context, _ in pairs]
        encoded = iter(self._encode([context for context in contexts if context]))
        wholes = iter(self._encode([a + b for (a, b), context in zip(pairs, contexts, strict=True) if context]))
        alone = iter(
            self._encode([a + b for (a, b), context in zip(pairs, contexts, strict=True) if not context], False)
        )
        windows = []
        for context in contexts:
            if context:
                ids = next(encoded)
                windows.append((ids, next(wholes)[len(ids) :]))
            else:
                ids = next(alone)
                has_prefix = ids[:1] == [self.prefix_token_id]
                windows.append((ids[:1], ids[1:]) if has_prefix else ([self.prefix_token_id], ids))
        return windows

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[Any, ...] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Score windows. The first entry of a request is its key in the harness's cache; None: it has none."""
        answers: list[tuple[float, bool]] = []
        items = [self._item(context, continuation) for _, context, continuation in requests]
        _warn_of_cut([(len(a) + len(b), self.max_length + 1) for _, a, b in requests])
        jobs = (wire.Score(model=self.model, items=chunk, rank=True, **self._job_options) for chunk in _divide(items))
        with tqdm(total=len(items), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for result in self._run(jobs):
                for sequence in result.sequences:
                    assert sequence.logprob_sum is not None
                    answer = sequence.logprob_sum, bool(sequence.is_greedy)
                    if (key := requests[len(answers)][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                    answers.append(answer)
                bar.update(len(result.sequences))
        return answers

    def _item(self, context: list[int], continuation: list[int]) -> wire.ScoreItem:
        if not 0 < len(continuation) <= self.max_length:
            text = self.tokenizer.text(context[-TOKENS_SHOWN:])
            raise ArgumentError(
                f"a continuation has {len(continuation)} tokens after the context {text!r}: expected 1 to "
                f"max_length, {self.max_length}"
            )
        ids = (context + continuation)[-(self.max_length + 1) :]
        start = len(ids) - len(continuation)
        return wire.ScoreItem(prompt=ids[:start], completion=ids[start:])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the logprob of each text, in windows of `max_length` tokens."""
        texts = [request.args[0] for request in requests]
        windows: list[tuple[None, list[int], list[int]]] = []
        ends = []  # of the windows of each text
        for ids in self._encode(texts):
            rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *make_disjoint_window(window)) for window in rolling]
            ends.append(len(windows))
        answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        sums = [sum((value for value, _ in answers[start:end]), 0.0) for start, end in pairwise([0, *ends])]
        for text, value in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), value)
        return sums

    # generate_until

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that the model generates after each prompt, up to a stop string.

        Raises ArgumentError for arguments of the generation that a job does not have.
        """
        answers: list[str] = []
        prompts = self._encode([request.args[0] for request in requests])
        options = [dict(normalize_gen_kwargs(request.args[1], self.max_gen_toks)) for request in requests]
        eos = self.tokenizer.token(self.eot_token_id)
        limits = [self.max_length - each["max_gen_toks"] for each in options]
        _warn_of_cut([(len(ids), limit) for ids, limit in zip(prompts, limits, strict=True) if limit > 0])
        stops = [handle_stop_sequences(each.pop("until"), eos) for each in options]
        jobs = map(self._generation, prompts, options, stops)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for result in self._run(jobs):
                request, stop = requests[len(answers)], stops[len(answers)]
                text = self.tokenizer.decode(result.sequences[0])
                text = postprocess_generated_text(text, stop, self._think_end_token)
                self.cache_hook.add_partial("generate_until", request.args, text)
                answers.append(text)
                bar.update()
        return answers

    def _generation(self, ids: list[int], sampling: dict[str, Any], stop: list[str]) -> wire.Generate:
        max_tokens, is_sampled = sampling.pop("max_gen_toks"), sampling.pop("do_sample")
        sampling.setdefault("temperature", 1.0 if is_sampled else 0.0)
        if unknown := sampling.keys() - SAMPLING:
            raise ArgumentError(
                f"generation arguments {', '.join(sorted(unknown))}: expected {', '.join(sorted(SAMPLING))}"
            )
        max_prompt = self.max_length - max_tokens
        if max_prompt < 1:
            raise ArgumentError(f"max_gen_toks is {max_tokens}: expected less than max_length, {self.max_length}")
        # Reasoning may hold a stop string. The text is cut at each one, also at those that a job cannot take.
        sent = [] if self._think_end_token else [text for text in stop if 0 < len(text) <= MAX_STOP_STRING_LENGTH]
        return wire.Generate(
            model=self.model,
            prompt=ids[-max_prompt:] or [self.prefix_token_id],
            max_tokens=max_tokens,
            stop=sent[:MAX_STOP_STRINGS],
            stop_token_ids=[self.eot_token_id],
            skip_special_tokens=True,
            logprobs=False,
            **sampling,
            **self._job_options,
        )

    # Jobs.

    def _run(self, jobs: Iterable[wire.Request]) -> Iterator[wire.Result]:
        """Yield the results of jobs in order.

        Raises JobFailed; MixedResults if another model answers than at the start.
        """
        with closing(run(self._client, jobs, self._max_in_flight)) as results:
            for result in results:
                if not wire.are_of_one_model(self.stamp, result.stamp):
                    differences = "; ".join(wire.stamp_differences(self.stamp, result.stamp))
                    raise MixedResults(f"{self.model} has changed since the evaluation began: {differences}")
                yield result


def _warn_of_cut(lengths: Sequence[tuple[int, int]]) -> None:
    """Say how many contexts lose their beginning, as the HF model does for each. Given are tokens, and their limit."""
    cut = [length for length, limit in lengths if length > limit]
    if cut:
        logger.warning(
            "%d of %d requests have more tokens than fit (max_length), up to %d: their contexts lose the beginning",
            *(len(cut), len(lengths), max(cut)),
        )


def _divide(items: Iterable[wire.ScoreItem]) -> Iterator[list[wire.ScoreItem]]:
    """Yield the items of each job."""
    chunk: list[wire.ScoreItem] = []
    num_tokens = 0
    for item in items:
        size = len(item.prompt or ()) + len(item.completion)
        if chunk and (len(chunk) == ITEMS_PER_JOB or num_tokens + size > TOKENS_PER_JOB):
            yield chunk
            chunk, num_tokens = [], 0
        chunk.append(item)
        num_tokens += size
    if chunk:
        yield chunk
