"""Refuse requests that are well formed but cannot run: a model that is not served, unknown token ids, ..."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from scorepool import store, wire
from scorepool.api.http import tasks
from scorepool.api.http.errors import BadRequest, Forbidden, TooLarge, map_field_names
from scorepool.api.images.limits import check_file, check_url
from scorepool.api.repositories.models import Models
from scorepool.api.repositories.quota import MAX_CONTEXT, report_size
from scorepool.api.repositories.webhook_endpoints import WebhookEndpoints
from scorepool.wire.request import exceeds_top_cap
from scorepool.wire.request_fields import MAX_TARGETS

CHARACTERS_PER_TOKEN = 4  # about, of text; its worker counts its tokens


class Admission:
    """Check requests against the models that workers serve, before they are put on the queue."""

    def __init__(
        self,
        settings: store.Settings,
        now_s: Callable[[], Awaitable[float]],
        models: Models,
        endpoints: WebhookEndpoints,
        servers: store.ServerMap,
    ) -> None:
        """`now_s` returns the unix time by Redis's clock."""
        self._high_priority_names = {name.strip() for name in settings.high_priority_keys.split(",")} - {""}
        self._now_s = now_s
        self._servers = servers
        self._settings = settings
        self._models = models
        self._endpoints = endpoints

    async def check(self, requests: Sequence[wire.Request], is_bulk: bool) -> None:
        """Check all requests. Fields of a bulk begin with `[index].`. Raises BadRequest, ModelNotServed."""
        bases = [request.base for request in requests if isinstance(request, wire.Compare)]
        served = await self._models.serving([*(request.model for request in requests), *bases])
        expires = any(request.expires_at is not None for request in requests)
        now = await self._now_s() if expires else 0.0
        async for index, request in tasks.in_turns(enumerate(requests)):
            where = f"[{index}]." if is_bulk else ""
            self._check_one(request, served[request.model], now, where)
            if isinstance(request, wire.Compare):
                self._check_base(request, served, now, where)
        if not self._servers.is_one:
            self._check_servers(requests, served, is_bulk)

    def check_priorities(self, owner: str, requests: Sequence[wire.Request], is_bulk: bool) -> None:
        """Check that the owner may use the requests' priorities. Raises Forbidden.

        Tokenize jobs may have any: the server itself submits them.
        """
        if not self._high_priority_names or owner in self._high_priority_names:
            return
        for index, request in enumerate(requests):
            if request.priority == "high" and not isinstance(request, wire.Tokenize):
                field = f"[{index}].priority" if is_bulk else "priority"
                raise Forbidden(
                    f"{field}: expected normal or low, found high, which this server leaves to the keys that "
                    "SCOREPOOL_HIGH_PRIORITY_KEYS names",
                    field,
                )

    def _check_one(self, request: wire.Request, served: Sequence[wire.ServedModel], now: float, where: str) -> None:
        if request.model == store.WEBHOOKS:
            raise BadRequest(f"{where}model: {store.WEBHOOKS!r} is the name of the webhook queue", f"{where}model")
        if request.expires_at is not None and request.expires_at <= now:
            raise BadRequest(
                f"{where}expires_at: expected a time in the future, in seconds since 1970, "
                f"found {request.expires_at:.3f}; now it is {now:.3f}",
                f"{where}expires_at",
            )
        if request.webhook is not None:
            self._endpoints.check_url(request.webhook, f"{where}webhook")
        if not served:
            self._models.check_not_partial(request.model, where)
            if not request.wait_for_model:
                raise self._models.not_served(request.model, f"{where}model")
        self._models.check_adapter(request, served, where)
        if served:
            _check_kind(request, served, where)
        self._check_images(request, served, where)
        self._check_size(request, where)
        self._check_mode(request, where)
        self._check_top_logprobs(request, where)
        request = wire.with_top_k(request, max((model.vocab_size for model in served), default=MAX_TARGETS))
        _check_result(request, max((model.context_length for model in served), default=MAX_CONTEXT), where)
        if served:
            _check_tokens(request, served, where)

    def _check_base(
        self, request: wire.Compare, served: Mapping[str, Sequence[wire.ServedModel]], now: float, where: str
    ) -> None:
        """Check the job of a compare job's base, and that both models have one vocabulary."""
        with map_field_names(lambda field: f"{where}base" if field == f"{where}model" else field):
            self._check_one(request.base_request(), served[request.base], now, where)
        sizes = [served[name][0].vocab_size for name in (request.base, request.model) if served[name]]
        if len(set(sizes)) == 2:
            raise BadRequest(
                f"{where}base: {request.base!r} has a vocabulary of {sizes[0]} tokens and {request.model!r} one of "
                f"{sizes[1]}; expected models of one vocabulary",
                f"{where}base",
            )

    def _check_servers(
        self, requests: Sequence[wire.Request], served: Mapping[str, Sequence[wire.ServedModel]], is_bulk: bool
    ) -> None:
        """Check that one server takes all jobs of a request: they are queued all or none. Raises BadRequest."""
        named = [
            (f"[{index}].{field}" if is_bulk else field, name)
            for index, request in enumerate(requests)
            for field, name in (("model", request.model), ("base", getattr(request, "base", request.model)))
        ]
        server_of = {name: self._servers.of_model(served[name][0].id if served[name] else name) for _, name in named}
        for field, name in named:
            if server_of[name] != server_of[requests[0].model]:
                raise BadRequest(
                    f"{field}: {name!r} and {requests[0].model!r} are on two Redis servers (SCOREPOOL_REDIS_URLS), and "
                    "the jobs of one request are queued all or none; expected models of one server",
                    field,
                )

    def _check_top_logprobs(self, request: wire.Request, where: str) -> None:
        """Check the server's cap. A job is refused, not clamped: a loss of fewer terms would be another loss."""
        cap = self._settings.max_top_logprobs
        if isinstance(request, wire.Score | wire.Generate) and exceeds_top_cap(request.top_logprobs, cap):
            raise BadRequest(
                f"{where}top_logprobs: expected 0 to {cap}, this server's SCOREPOOL_MAX_TOP_LOGPROBS, "
                f"found {request.top_logprobs}",
                f"{where}top_logprobs",
            )

    def _check_mode(self, request: wire.Request, where: str) -> None:
        """Check that a generation can report the logprobs of its mode."""
        request = with_default_mode(request, self._settings)
        if isinstance(request, wire.Generate) and (conflict := wire.mode_conflict(request)):
            field, sentence = conflict
            raise BadRequest(f"{where}{field}: {sentence}", f"{where}{field}")

    def _check_images(self, request: wire.Request, served: Sequence[wire.ServedModel], where: str) -> None:
        """Check that the model takes images, and the server's limits. Nothing is decoded."""
        images = list(wire.images_of(request))
        if not images:
            return
        first = f"{where}{images[0][0]}"
        if served and not any(model.images for model in served):
            reason = served[0].images_unsupported or "it is a model of texts"
            raise BadRequest(f"{first}: the model {request.model!r} takes no images: {reason}", first)
        settings = self._settings
        if len(images) > settings.max_images:
            raise TooLarge(
                f"{first}: expected at most {settings.max_images} images in one job (SCOREPOOL_MAX_IMAGES), found "
                f"{len(images)}",
                first,
            )
        for field, image in images:
            if image.url is None:
                check_file(image, f"{where}{field}", settings)
            else:
                check_url(image.url, f"{where}{field}", settings)

    def _check_size(self, request: wire.Request, where: str) -> None:
        """Check the size of a job whose items share a prompt as if each had it: the worker encodes it for each."""
        if not isinstance(request, wire.Score) or request.prompt is None:
            return
        most, num_bytes = self._settings.max_body_bytes, len(wire.encode(request.prompt))
        if num_bytes * len(request.items) > most:
            raise TooLarge(
                f"{where}prompt: {num_bytes} bytes before each of {len(request.items)} items; expected at most {most} "
                "together (SCOREPOOL_MAX_BODY_BYTES); send several jobs",
                f"{where}prompt",
            )


def with_default_mode(request: wire.Request, settings: store.Settings) -> wire.Request:
    """Give a generation that chooses no mode of logprobs that of the server: its worker has other settings."""
    is_open = isinstance(request, wire.Generate) and request.logprobs and request.logprobs_mode is None
    if not is_open or settings.logprobs_mode == "raw_logprobs":  # which is what null is for a worker
        return request
    return replace(request, logprobs_mode=settings.logprobs_mode)


def _check_kind(request: wire.Request, served: Sequence[wire.ServedModel], where: str) -> None:
    """Check that the model does what the job asks for: a classifier classifies, a language model has logprobs."""
    is_classified = isinstance(request, wire.Classify)
    is_other = isinstance(request, wire.Tokenize | wire.Embed)
    if isinstance(request, wire.Tokenize) or (not is_other and is_classified == (served[0].classifier is not None)):
        return
    found = wire.kind_of(request)
    if isinstance(request, wire.Embed):
        if served[0].pooling is not None:
            return
        message = f"{where}model: {request.model!r} makes no embeddings; `pooling` of GET /v1/models says which do"
        raise BadRequest(message, f"{where}model")
    if served[0].classifier is None:
        what, expected = "language model, which classifies nothing", "score or generate"
    else:
        what, expected = "classifier, which has no logprobs", "classify"
    raise BadRequest(
        f"{where}model: {request.model!r} is a {what}; expected a {expected} job, found {found}", f"{where}model"
    )


def _check_result(request: wire.Request, context_length: int, where: str) -> None:
    """Check how much a job may report, about: a worker holds all of it until the job ends."""
    report = report_size(request, context_length, CHARACTERS_PER_TOKEN)
    if excess := wire.report_excess(request, report.num_tokens, report.num_targets):
        field, sentence = excess
        raise TooLarge(f"{where}{field}: {sentence}", f"{where}{field}")


def _check_tokens(request: wire.Request, served: Sequence[wire.ServedModel], where: str) -> None:
    """Check ids and lengths against the model's worker with the longest context and the largest vocabulary."""
    vocab_size = max(model.vocab_size for model in served)
    context_length = max(model.context_length for model in served)
    if isinstance(request, wire.Score | wire.Generate) and request.top_logprobs > vocab_size:
        raise BadRequest(
            f"{where}top_logprobs: expected at most {vocab_size}, the model's vocabulary, found {request.top_logprobs}",
            f"{where}top_logprobs",
        )
    _check_parameter_ids(request, vocab_size, where)
    for field, ids in _id_lists(request):
        if _is_reported(request, field):
            continue
        if max(ids) >= vocab_size:
            index = next(index for index, token_id in enumerate(ids) if token_id >= vocab_size)
            full = f"{where}{field}[{index}]"
            raise BadRequest(f"{full}: expected a token id below {vocab_size}, found {ids[index]}", full)
    for field, num_ids in _lengths(request):
        if _is_reported(request, field) or getattr(request, "truncate", None):
            continue
        if num_ids > context_length:
            full = f"{where}{field}"
            raise BadRequest(
                f"{full}: expected at most {context_length} token ids, the model's context, found {num_ids}", full
            )
        if isinstance(request, wire.Generate) and num_ids + (request.max_tokens or 0) > context_length:
            raise BadRequest(
                f"{where}max_tokens: expected at most {context_length - num_ids} after {num_ids} token ids of prompt, "
                f"the model's context being {context_length}, found {request.max_tokens}",
                f"{where}max_tokens",
            )


def _is_reported(request: wire.Request, field: str) -> bool:
    """True if the error of an item goes into the job's result."""
    return getattr(request, "on_item_error", "fail") == "report" and field.startswith("items[")


def _check_parameter_ids(request: wire.Request, vocab_size: int, where: str) -> None:
    """Check the token ids in the parameters of a generation."""
    if not isinstance(request, wire.Generate):
        return
    given: dict[str, Iterable[int]] = {
        "logit_bias": request.logit_bias,
        "stop_token_ids": request.stop_token_ids,
        "allowed_token_ids": request.allowed_token_ids or (),
    }
    for field, ids in given.items():
        for token_id in ids:
            if token_id >= vocab_size:
                full = f"{where}{field}"
                raise BadRequest(f"{full}: expected token ids below {vocab_size}, found {token_id}", full)


def _id_lists(request: wire.Request) -> Iterator[tuple[str, list[int]]]:
    """Yield each list of token ids that is not empty, with the name of its field. A shared prompt comes once."""
    if isinstance(request, wire.Classify | wire.Embed):
        yield from _prompts_of_ids(request.items)
        return
    if isinstance(request.prompt, list) and request.prompt:
        yield "prompt", request.prompt
    for index, item in enumerate(request.items if isinstance(request, wire.Score) else ()):
        if isinstance(item.prompt, list):
            yield f"items[{index}].prompt", item.prompt
        if isinstance(item.completion, list):
            yield f"items[{index}].completion", item.completion
        for entry, ids in enumerate(item.target_lists or ()):
            if ids:
                yield f"items[{index}].targets[{entry}]", ids
        if item.targets and not item.target_lists:
            yield f"items[{index}].targets", [each for each in item.targets if isinstance(each, int)]
    if not isinstance(request, wire.Tokenize) and request.targets:
        yield "targets", request.targets


def _lengths(request: wire.Request) -> Iterator[tuple[str, int]]:
    """Yield the number of token ids of each sequence for the model that is given as ids, with its field's name."""
    if isinstance(request, wire.Score):
        for index, (prompt, completion) in enumerate(request.pairs()):
            if isinstance(prompt, list):
                yield f"items[{index}]", len(prompt) + len(completion)
    elif isinstance(request, wire.Classify | wire.Embed):
        for field, ids in _prompts_of_ids(request.items):
            yield field, len(ids)
    elif isinstance(request, wire.Generate) and isinstance(request.prompt, list):
        yield "prompt", len(request.prompt)


def _prompts_of_ids(items: Sequence[wire.ClassifyItem | wire.EmbedItem]) -> Iterator[tuple[str, list[int]]]:
    """Yield the prompts that are given as ids, with the names of their fields."""
    for index, one in enumerate(items):
        if isinstance(one.prompt, list):
            yield f"items[{index}].prompt", one.prompt
