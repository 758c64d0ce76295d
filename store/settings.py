"""SCOREPOOL_* variables, read once at a process's start. An unknown name or a bad value stops the start."""

import difflib
import os
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, get_type_hints

import msgspec
import msgspec.inspect
from msgspec import Meta, Struct

from scorepool.store.keys import DEFAULT_PREFIX, WEBHOOKS_NAME
from scorepool.store.logs import LogFormat
from scorepool.wire.columns import LogprobsMode
from scorepool.wire.image import MAX_FRAMES, MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, MAX_IMAGES
from scorepool.wire.request_fields import ModelName

PREFIX = "SCOREPOOL_"
LOCAL_OWNER = "local"  # the owner of every job of a server without keys; no key has the name
KEY_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # names the owner of an API key
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
YEAR_S = 366 * 86_400
Seconds = Annotated[float, Meta(gt=0, le=YEAR_S)]
Interval = Annotated[float, Meta(ge=0.1, le=YEAR_S)]  # seconds; loops run several times in each
FormatName = Annotated[str, Meta(pattern=r"\A[a-z0-9_]{1,40}\Z")]  # the engine knows them
Count = Annotated[int, Meta(ge=1, le=2**48)]  # Redis and Lua count exactly up to 2**53
KeyNames = Annotated[str, Meta(pattern=rf"^(\s*{KEY_NAME}(\s*,\s*{KEY_NAME})*\s*)?\Z")]
PublicUrl = Annotated[str, Meta(pattern=r"^(https?://[!-~]+)?\Z")]
RedisPrefix = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")]  # see store/keys.py


class SettingsError(ValueError):
    """A variable is wrong. The message names it and says what would be right."""


def parse_model(spec: str) -> tuple[list[str], str]:
    """Split `NAME[,ALIAS...]=FOLDER_OR_HUB_ID` into ([NAME, ALIAS, ...], FOLDER_OR_HUB_ID). Raises SettingsError."""
    listed, _, source = spec.partition("=")
    names = listed.split(",")
    for name in names:
        try:
            msgspec.convert(name, ModelName)
        except msgspec.ValidationError as error:
            raise SettingsError(f"model {spec!r}: the name must be NAME[,ALIAS...]=FOLDER_OR_HUB_ID: {error}") from None
        if name == WEBHOOKS_NAME:
            raise SettingsError(f"model {spec!r}: the name {WEBHOOKS_NAME!r} belongs to the queue of deliveries")
    if not source:
        raise SettingsError(f"model {spec!r}: expected NAME[,ALIAS...]=FOLDER_OR_HUB_ID")
    if len(set(names)) < len(names):
        raise SettingsError(f"model {spec!r}: the same name is given twice")
    return names, source


def parse_drafts(spec: str) -> dict[str, str]:
    """Split `NAME=FOLDER_OR_HUB_ID[;NAME=...]` into the draft model of each name. Raises SettingsError."""
    drafts: dict[str, str] = {}
    for one in spec.split(";") if spec else ():
        try:
            names, source = parse_model(one.strip())
        except SettingsError:
            names, source = [], ""
        if len(names) != 1 or names[0] in drafts:
            raise SettingsError(f"draft {one!r}: expected one NAME=FOLDER_OR_HUB_ID for each name")
        drafts[names[0]] = source
    return drafts


class AdapterSpec(Struct, frozen=True):
    """Name a LoRA adapter, the model that it belongs to, and its folder. Without a model: the only one."""

    name: str
    model: str | None
    folder: str


def parse_adapters(text: str) -> list[AdapterSpec]:
    """Split `NAME[@MODEL]=FOLDER[;NAME=...]`. Raises SettingsError."""
    specs: list[AdapterSpec] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        names, _, folder = part.partition("=")
        name, _, model = names.partition("@")
        try:
            for each in (name, model) if "@" in names else (name,):
                msgspec.convert(each, ModelName)
        except msgspec.ValidationError as error:
            raise SettingsError(f"adapter {part!r}: expected NAME=FOLDER or NAME@MODEL=FOLDER: {error}") from None
        if not folder:
            raise SettingsError(f"adapter {part!r}: expected NAME=FOLDER or NAME@MODEL=FOLDER")
        if name in [spec.name for spec in specs]:
            raise SettingsError(f"adapter {part!r}: the name {name!r} is given twice")
        specs.append(AdapterSpec(name, model or None, folder))
    return specs


def parse_models(specs: Iterable[str], place: str) -> list[tuple[list[str], str]]:
    """Parse several models. Raises SettingsError that names the place, also if two of them share a name."""
    parsed, known = [], set[str]()
    for spec in specs:
        names, source = parse_model(spec)
        for name in names:
            if name in known:
                raise SettingsError(f"{place}: the name {name!r} is given to two models; expected names that differ")
        known.update(names)
        parsed.append((names, source))
    return parsed


class Settings(Struct, frozen=True, kw_only=True):
    """The settings. The field `api_keys` is the variable SCOREPOOL_API_KEYS."""

    redis_url: str = "redis://127.0.0.1:6379/0"
    redis_url_file: str = ""  # a file that holds the URL, instead of redis_url
    redis_urls: str = ""  # JSON, {"MODEL": "URL"}: models whose jobs are on other servers, see store/server_map.py
    redis_urls_file: str = ""  # a file that holds this object, instead of redis_urls
    redis_prefix: RedisPrefix = DEFAULT_PREFIX
    log_level: LogLevel = "INFO"
    log_format: LogFormat = "text"
    traces: Literal["off", "otlp"] = "off"  # otlp: where the OTEL_EXPORTER_OTLP_* variables say
    redis_appendfsync: Literal["always", "everysec"] = "always"  # of the embedded Redis
    redis_maxmemory: Annotated[int, Meta(ge=0)] = (
        0  # of the embedded Redis, bytes; 0: a quarter of the machine's memory
    )
    state_dir: str = ""  # for what outlives a process: the embedded Redis, certificates; "": see state_folder
    certificate_dir: str = ""  # "": `certificates` in the state folder

    # api
    api_keys: str = (
        ""  # comma-separated `name:sha256-hex[:weight]`, as `scorepool key NAME` prints; none means loopback only
    )
    api_keys_file: str = ""  # the same, one a line
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    uds: str = ""  # path of a unix socket to listen on, instead of host and port
    public_url: PublicUrl = ""  # how others reach this API, for links in webhooks; default http://host:port
    high_priority_keys: KeyNames = (
        ""  # comma-separated names of keys that may submit jobs of priority high; "": all may
    )
    operator_keys: KeyNames = ""  # comma-separated names of keys that see the jobs of every name on the page
    max_body_bytes: Count = 32 * 2**20
    max_batches_per_key: Count = 1000  # that have not ended
    max_bulk_jobs: Count = 1000
    max_file_bytes: Count = 200 * 2**20  # of one uploaded file
    max_weights_bytes: Count = 8 * 2**30  # of weights that are sent: Redis holds them
    max_queue_depth: Count = 100_000  # jobs waiting in one queue before 429
    max_jobs_per_key: Annotated[int, Meta(ge=0, le=2**48)] = 0  # waiting, running and kept, of one name; 0: no limit
    max_bytes_per_key: Annotated[int, Meta(ge=0, le=2**48)] = (
        0  # of jobs, results and files in Redis, of one name; 0: no limit with one name, half of maxmemory with several
    )
    redis_min_replicas: Annotated[int, Meta(ge=0, le=1000)] = 0  # that must have a job before it is accepted
    max_unserved_queues_per_key: Annotated[int, Meta(ge=0, le=2**48)] = (
        100  # of models that no worker serves, of one name
    )
    max_unserved_queues: Annotated[int, Meta(ge=0, le=2**48)] = 1000  # the same, of all names together
    max_top_logprobs: Annotated[int, Meta(ge=-1, le=1024)] = (
        -1  # most likely tokens at a position; dialects clamp and say so, native jobs are refused; -1: no cap
    )
    max_images: Annotated[int, Meta(ge=1, le=MAX_IMAGES)] = 16  # of one job
    max_image_bytes: Annotated[int, Meta(ge=1, le=MAX_IMAGE_BYTES)] = 16 * 2**20  # of the file of one image
    max_image_pixels: Annotated[int, Meta(ge=1, le=MAX_IMAGE_PIXELS)] = 2**25  # of one image
    max_video_frames: Annotated[int, Meta(ge=1, le=MAX_FRAMES)] = 128  # of one video
    fetch_images: Literal["off", "public", "any"] = "off"  # by URL; any: http and addresses that are not public too
    fetch_images_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 10.0  # of one image, from the lookup of the name on
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of generations that choose none
    max_wait_s: Seconds = 300.0  # cap of `Prefer: wait` and `?wait=`; echoed when it clamps
    result_ttl_s: Count = 86_400
    max_inline_result_bytes: Annotated[int, Meta(ge=0, le=2**28)] = (
        0  # of a result in Redis; a larger one goes to result_store; 0: 2**28, or 2**20 beside a result store
    )
    result_store: str = ""  # URL of a folder or an object store for larger results; "": they fail
    result_cache_bytes: Annotated[int, Meta(ge=0, le=2**48)] = (
        2**27  # of Redis's memory, for what need not be computed again; 0: everything is computed
    )
    result_cache_ttl_s: Count = 86_400  # after its last use, an entry of the result cache is dropped

    checkpoint_s: Annotated[float, Meta(ge=0, le=YEAR_S)] = (
        2.0  # a job that runs for longer keeps its finished rows in Redis, so often; 0: none does
    )
    checkpoint_bytes: Annotated[int, Meta(ge=0, le=2**48)] = 2**24  # of the rows that one running job keeps

    # worker
    model: str = ""  # NAME[,ALIAS...]=FOLDER_OR_HUB_ID
    adapters: str = ""  # NAME[@MODEL]=FOLDER[;NAME=...]: LoRA adapters to load
    models: str = ""  # instead of model, several in one worker process: the same form, separated by semicolons
    model_turn_s: Annotated[float, Meta(ge=0.1, le=YEAR_S)] = (
        10.0  # of several models that do not fit together: how long one keeps the memory while others wait
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    ranks: Annotated[int, Meta(ge=1, le=64)] = 1  # worker processes that hold the model together, under mlx.launch
    mode: Literal["default", "exact"] = "default"  # exact: bit for bit the same in any batch, slower
    tool_parser: FormatName = (
        "auto"  # the format in which the model calls functions, by vLLM's name; auto: as the model tells
    )
    reasoning_parser: FormatName = "auto"  # the tags around its reasoning, by vLLM's name
    tool_repair: bool = False  # calls that a degraded model writes as text are calls too, where tools are offered
    require_certificate: bool = False  # serve no model without a certificate that fits
    max_jobs_in_flight: Count = 512  # and results that wait to be recorded; the worker claims as few as it needs
    max_batch_tokens: Count = 2048
    prefill_ms: Annotated[int, Meta(ge=1, le=600_000)] = 250  # that prompts add to a step beside decoding sequences
    prefix_disk_bytes: Annotated[int, Meta(ge=0)] = 0  # of files that keep such KV caches beyond a restart; 0: none
    prefix_cache_bytes: Annotated[int, Meta(ge=0)] = 2**30  # of KV caches of prompts that several jobs begin with
    memory_bytes: Annotated[int, Meta(ge=0)] = 0  # for weights and caches; 0: four fifths of what the machine has
    max_running_rows: Count = 32
    # ngram: propose tokens that repeat the row's text; mtp: those of the checkpoint's head; the same results
    speculation: Literal["off", "ngram", "mtp"] = "off"
    drafts: str = ""  # NAME=FOLDER_OR_HUB_ID[;NAME=...]: models that propose tokens for those of these names
    speculation_tokens: Annotated[int, Meta(ge=1, le=16)] = 8  # of a row that one step verifies, at most
    crosscheck: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of score jobs that a second worker computes too
    idle_unload_s: Annotated[float, Meta(ge=0, le=YEAR_S)] = 0.0  # idle for so long, it drops its weights; 0: never
    keep_awake: bool = True  # a Mac does not idle into sleep while it has jobs
    adapt_budget: bool = True  # a Mac's heat, low memory and battery lower the batch budget
    lease_s: Interval = 20.0  # how long a silent worker keeps its jobs, on a good link
    drain_timeout_s: Seconds = 60.0
    model_grace_s: Annotated[int, Meta(ge=0, le=YEAR_S)] = (
        600  # how long jobs for a model are accepted after its last worker left
    )
    crash_limit: Count = 5  # a job that ran alone at so many deaths of its worker fails with `crashed`
    stall_timeout_s: Interval = 300.0  # a step, a tokenizing or a turn of the loop that takes longer ends the worker

    # client
    url: str = ""  # of the API that commands use; "": where `scorepool serve` listens by default
    api_key: str = ""  # that commands send
    client_key: str = ""  # an older name of api_key

    # webhooks
    webhook_secret: str = ""  # whsec_...; several, space-separated, all sign (rotation)
    webhook_allow_private: bool = False  # allow http and addresses that are not public
    webhook_max_in_flight: Count = 200
    webhook_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 15.0  # of one attempt, from the lookup of the name on

    @property
    def model_specs(self) -> list[str]:
        """The models of a worker, each in the form of SCOREPOOL_MODEL; none if the settings name none."""
        if self.models:
            return [spec.strip() for spec in self.models.split(";") if spec.strip()]
        return [self.model] if self.model else []

    def job_url(self, job_id: str) -> str:
        """Return the URL at which a job and its result are fetched."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.public_url.rstrip('/') or f'http://{host}:{self.port}'}/v1/jobs/{job_id}"

    def check_keys(self) -> None:
        """Refuse a server without keys beside the key of a client: the setting may be a misspelt SCOREPOOL_API_KEYS.

        Raises SettingsError.
        """
        if self.api_key and not self.api_keys and not self.api_keys_file:
            raise SettingsError(
                "SCOREPOOL_API_KEY is set, the key that a client sends, and no keys that a server accepts: set "
                "SCOREPOOL_API_KEYS to the entry that `scorepool key NAME` prints, or start a server that needs no key "
                "without the other, as in `env -u SCOREPOOL_API_KEY scorepool serve`"
            )

    def state_folder(self) -> Path:
        """Return the folder for state that outlives a process. It may not exist yet. Raises SettingsError.

        The default is ~/Library/Application Support/scorepool on macOS and $XDG_STATE_HOME/scorepool elsewhere
        (https://specifications.freedesktop.org/basedir-spec).
        """
        try:
            if self.state_dir:
                return Path(self.state_dir).expanduser()
            if sys.platform == "darwin":
                return Path.home() / "Library" / "Application Support" / "scorepool"
            return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "scorepool"
        except RuntimeError as error:  # no home folder
            raise SettingsError(f"SCOREPOOL_STATE_DIR={self.state_dir!r}: {error}; expected a folder") from None

    def certificate_folder(self) -> Path:
        """Return the folder of certificates. It may not exist. Raises SettingsError."""
        return Path(self.certificate_dir).expanduser() if self.certificate_dir else self.state_folder() / "certificates"

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read and check the settings. Raises SettingsError."""
        environ = os.environ if environ is None else environ
        given = {name[len(PREFIX) :].lower(): value for name, value in environ.items() if name.startswith(PREFIX)}
        for name in given:
            if name not in cls.__struct_fields__:
                close = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
                hint = f"; did you mean {PREFIX}{close[0].upper()}?" if close else ""
                raise SettingsError(f"{PREFIX}{name.upper()} is not a setting{hint}")
        for name in ("api_keys", "api_keys_file"):
            if not given.get(name, "-").strip():  # without keys anyone on the machine may use the API
                raise SettingsError(
                    f"{PREFIX}{name.upper()} is set and empty: give keys, as `scorepool key NAME` prints them, "
                    "or leave the variable out for a server without keys"
                )
        if given.get("model") and given.get("models"):
            raise SettingsError(f"{PREFIX}MODEL and {PREFIX}MODELS are both set: leave one of them out")
        if path := given.get("redis_url_file"):
            if given.get("redis_url"):
                raise SettingsError(f"{PREFIX}REDIS_URL and {PREFIX}REDIS_URL_FILE are both set: leave one of them out")
            given["redis_url"] = _read_redis_url(path)
        if path := given.get("redis_urls_file"):
            if given.get("redis_urls"):
                names = f"{PREFIX}REDIS_URLS and {PREFIX}REDIS_URLS_FILE"
                raise SettingsError(f"{names} are both set: leave one of them out")
            given["redis_urls"] = _read_secret(path, f"{PREFIX}REDIS_URLS_FILE={path!r}")
        if "log_level" in given:
            given["log_level"] = given["log_level"].upper()
        if "log_format" in given:
            given["log_format"] = given["log_format"].lower()
        for name, value in given.items():
            try:
                msgspec.convert({name: value}, cls, strict=False)
            except UnicodeEncodeError:
                raise SettingsError(f"{PREFIX}{name.upper()}={value[:100]!r}: expected UTF-8") from None
            except msgspec.ValidationError as error:
                expectation = _expectation(name, error)
                raise SettingsError(f"{PREFIX}{name.upper()}={value[:100]!r}: {expectation}") from None
        return msgspec.convert(given, cls, strict=False)


def _expectation(name: str, error: msgspec.ValidationError) -> str:
    """Say what would be right."""
    kind = msgspec.inspect.type_info(get_type_hints(Settings, include_extras=True)[name])
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return f"expected one of {', '.join(str(value) for value in values)}"
        case msgspec.inspect.BoolType():
            return "expected true or false"
    expectation = str(error).partition(" - at")[0][:300]  # it may repeat the value
    match kind:
        case msgspec.inspect.IntType() if expectation.startswith("Expected `int`, got"):
            return "expected a whole number"
        case msgspec.inspect.FloatType() if expectation.startswith("Expected `float`, got"):
            return "expected a number"
    return expectation


def _read_redis_url(path: str) -> str:
    """Read the only line of a file. Raises SettingsError, without the line."""
    place = f"{PREFIX}REDIS_URL_FILE={path!r}"
    lines = _read_secret(path, place).split()
    if len(lines) != 1:
        raise SettingsError(f"{place}: expected one line with the URL, found {len(lines)} words")
    return lines[0]


def _read_secret(path: str, place: str) -> str:
    """Read a file that no other user may change. Raises SettingsError, without what the file holds."""
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder; ValueError: no UTF-8, a NUL
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise SettingsError(f"{place}: {reason}") from None
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise SettingsError(f"{place}: every user may write to it; run `chmod o-w` on it")
    return text
