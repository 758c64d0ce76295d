"""Spread models over several Redis servers: SCOREPOOL_REDIS_URLS, a map of model to URL.

Each server is a complete pool with the same keys, and knows no other. A job is wholly on the server of its model:
request, queue, outcome, quota and deliveries. SCOREPOOL_REDIS_URL names the first server, called home: it has all
models that the map does not name, and what belongs to no model.

The last four characters of a job's id name the server that it was put on; those of home's jobs name none, as in a
deployment with one server. They are a hint: a job that is not there is looked for on the others, so ids stay valid when
URLs change, and ids of before.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec
from msgspec import Struct
from redis.connection import parse_url

from scorepool.store.keys import WEBHOOKS_NAME
from scorepool.store.sentinel import SentinelUrl
from scorepool.store.settings import Settings, SettingsError
from scorepool.wire.request_fields import ModelName

HOME = 0  # the index of the server of SCOREPOOL_REDIS_URL
TAG_LENGTH = 4


class MappedServer(Struct, frozen=True):
    """Name a server, and the models that the map gives it. Home has all others too."""

    url: str
    models: tuple[str, ...]
    tag: str  # last characters of the ids of its jobs; "" of home
    other_tag: str = ""  # of its jobs of a time when it was not home, or when it was

    @property
    def setting(self) -> str:
        """Return the setting that names the server, for errors: a URL may hold a password."""
        return f"SCOREPOOL_REDIS_URLS[{self.models[0]!r}]" if self.tag else "SCOREPOOL_REDIS_URL"

    def stamp(self, job_id: str) -> str:
        """Return an id of the same form that names this server."""
        return stamp(job_id, self.tag)

    def stamp_otherwise(self, job_id: str) -> str:
        """Return the id that this server gave when it was home, or when it was not."""
        return stamp(job_id, self.other_tag)


class ServerMap(Struct, frozen=True):
    """The servers of a deployment, home first."""

    servers: tuple[MappedServer, ...]

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Read the map. Raises SettingsError, which shows no URL."""
        urls = _parse(settings.redis_urls)
        if not urls:  # whoever connects checks the URL
            return cls((MappedServer(settings.redis_url, (), ""),))
        home = _address(settings.redis_url, "SCOREPOOL_REDIS_URL")
        found: dict[str, tuple[str, list[str]]] = {home: (settings.redis_url, [])}
        for model, url in urls.items():
            address = _address(url, f"SCOREPOOL_REDIS_URLS[{model!r}]")
            known, models = found.setdefault(address, (url, []))
            if address != home and known != url:
                raise SettingsError(
                    f"SCOREPOOL_REDIS_URLS: the URLs of {models[0]!r} and {model!r} name one server and differ; "
                    "expected the same for both"
                )
            models.append(model)
        return cls(
            tuple(
                MappedServer(url, tuple(models), *(("", _tag(address)) if address == home else (_tag(address), "")))
                for address, (url, models) in found.items()
            )
        )

    @property
    def is_one(self) -> bool:
        """True if all jobs are on one server."""
        return len(self.servers) == 1

    def is_mapped(self, name: str) -> bool:
        """True if the map names the model."""
        return any(name in server.models for server in self.servers)

    def of_model(self, name: str) -> int:
        """Return the index of the server of a model, by the name that the map has."""
        return next((index for index, server in enumerate(self.servers) if name in server.models), HOME)

    def of_job(self, job_id: str) -> int:
        """Return the index of the server that the job's id names."""
        tag = job_id[-TAG_LENGTH:]
        return next((index for index, server in enumerate(self.servers) if server.tag == tag), HOME)

    def search_order(self, job_id: str) -> Sequence[int]:
        """Return the indices of all servers, the one that the job's id names first."""
        first = self.of_job(job_id)
        return [first, *(index for index in range(len(self.servers)) if index != first)]

    def of_worker(self, names: Iterable[str]) -> MappedServer:
        """Return the server of the models and aliases of one worker. Raises SettingsError if they have several."""
        by_index: dict[int, str] = {}
        for name in names:
            by_index.setdefault(self.of_model(name), name)
        if len(by_index) > 1:
            (_, one), (_, other), *_ = by_index.items()
            raise SettingsError(
                f"a worker has one Redis, and SCOREPOOL_REDIS_URLS puts {one!r} and {other!r} on two: give both names "
                "the same URL, or start a worker for each model"
            )
        return self.servers[next(iter(by_index), HOME)]


def stamp(job_id: str, tag: str) -> str:
    """Return an id of the same form that names the server of this tag."""
    return job_id[: len(job_id) - len(tag)] + tag


def _parse(text: str) -> dict[str, str]:
    """Read the map; empty if there is none. Raises SettingsError."""
    if not text.strip():
        return {}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise SettingsError(f"SCOREPOOL_REDIS_URLS: the model {name!r} is given twice")
        return dict(pairs)

    try:
        urls = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SettingsError):
            raise
        reason = getattr(error, "msg", "it is no JSON")  # the whole text may show a part of a password
        raise SettingsError(f'SCOREPOOL_REDIS_URLS: expected a JSON object {{"MODEL": "URL"}}: {reason}') from None
    if not isinstance(urls, dict) or not all(isinstance(url, str) for url in urls.values()):
        raise SettingsError('SCOREPOOL_REDIS_URLS: expected a JSON object {"MODEL": "URL"} whose values are texts')
    for name in urls:
        try:
            msgspec.convert(name, ModelName)
        except msgspec.ValidationError as error:
            raise SettingsError(f"SCOREPOOL_REDIS_URLS: {name[:200]!r} is no name of a model: {error}") from None
        if name == WEBHOOKS_NAME:
            raise SettingsError(
                f"SCOREPOOL_REDIS_URLS: {name!r} is the queue of deliveries, which every server has; expected models"
            )
    return urls


def _address(url: str, setting: str) -> str:
    """Return what names a server and its database, without user, password and options. Raises SettingsError."""
    try:
        sentinel = SentinelUrl.parse(url)
    except SettingsError as error:
        raise SettingsError(f"{setting}: {error}") from None
    parsed: dict[str, Any] = parse_url(url if sentinel is None else sentinel.master)
    database = parsed.get("db", 0)
    if sentinel is not None:
        hosts = ",".join(sorted(f"{host.lower()}:{port}" for host, port in sentinel.sentinels))
        return f"{hosts}/{sentinel.service}/{database}"
    if "path" in parsed:
        return f"{parsed['path']}/{database}"
    return f"{parsed.get('host', 'localhost').lower()}:{parsed.get('port', 6379)}/{database}"


def _tag(address: str) -> str:
    return hashlib.sha256(address.encode()).hexdigest()[:TAG_LENGTH]
