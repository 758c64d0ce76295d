"""The versions of a model's weights as one worker sees them: in Redis, and on this machine's disk."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from redis import Redis
from redis.client import Pipeline

from scorepool.store import Keys
from scorepool.store.scripts import load
from scorepool.store.weights import WeightsRecord
from scorepool.wire import WeightsSource, encode
from scorepool.worker.rq.clock import REDIS_CLOCK

KEPT_S = 86_400  # after the last heartbeat of a model's workers
Report = Literal["committed", "failed", "waiting", "gone"]


class WeightsUnavailable(Exception):
    """The weights of a version cannot be had on this machine. The message says why."""


class WeightsStore:
    """What one worker reads and writes of its model's versions. `folder` is for weights that were sent."""

    def __init__(self, connection: Redis, model: str, worker: str, folder: Path, queues: Sequence[str] = ()) -> None:
        self.model = model
        self.worker = worker
        self._queues = queues
        self._connection = connection
        self._folder = folder
        self._report = connection.register_script(load("report_weights.lua"))
        self._keep = connection.register_script(load("keep_weights.lua"))

    def join(self, pipeline: Pipeline, ttl_s: float) -> None:
        """Have no version committed without this worker for so long. Due with every heartbeat."""
        pipeline.zadd(Keys.weights_workers(self.model), {self.worker: REDIS_CLOCK.now_s() + ttl_s})
        for key in (Keys.weights_workers(self.model), Keys.weights_moves(self.model)):
            pipeline.expire(key, KEPT_S)  # killed workers leave their entries

    def leave(self, pipeline: Pipeline) -> None:
        """Have versions committed without this worker."""
        pipeline.zrem(Keys.weights_workers(self.model), self.worker)
        pipeline.hdel(Keys.weights_moves(self.model), self.worker)

    def join_and_read(self, ttl_s: float) -> WeightsRecord:
        """Join, then read what is committed. Raises RedisError."""
        with self._connection.pipeline() as pipeline:
            self.join(pipeline, ttl_s)
            pipeline.hgetall(Keys.weights(self.model))
            return WeightsRecord.parse(pipeline.execute()[-1])

    def read(self) -> WeightsRecord:
        """Read the versions. Raises RedisError."""
        fields: Any = self._connection.hgetall(Keys.weights(self.model))
        return WeightsRecord.parse(fields)

    def report(self, version: int, push_id: str, *, fingerprint: str = "", refusal: str = "") -> Report:
        """Say that this worker has loaded and checked a pending version, or why it refuses it. Raises RedisError."""
        answer: Any = self._report(
            args=[self.model, self.worker, version, push_id, fingerprint, refusal, *self._queues]
        )
        return answer.decode()  # type: ignore[no-any-return]

    def keep(self, version: int, source: WeightsSource, fingerprint: str) -> None:
        """Say which version this worker serves from now on. Raises RedisError."""
        at = f"{REDIS_CLOCK.now_s():.3f}"
        self._keep(args=[self.model, self.worker, version, encode(source), fingerprint, at])

    def fetch(self, source: WeightsSource) -> str:
        """Return the folder of a version's weights. What was sent is written to one. Raises WeightsUnavailable."""
        if source.upload is None:
            return source.path or ""
        folder = self._folder / str(os.getpid()) / source.upload
        try:
            if not folder.is_dir():
                self._write(source, folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsUnavailable(f"the weights cannot be written to {folder}: {error.strerror or error}") from error
        return str(folder)

    def _write(self, source: WeightsSource, folder: Path) -> None:
        folder.mkdir(parents=True)
        key = Keys.weights_upload(source.upload or "")
        num_bytes = 0
        with (folder / "model.safetensors").open("wb") as file:
            for number in range(source.num_chunks):
                chunk: Any = self._connection.hget(key, str(number))
                if chunk is None:
                    break
                num_bytes += file.write(chunk)
        if num_bytes != source.num_bytes:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsUnavailable(
                f"Redis has {num_bytes} of the {source.num_bytes} bytes of weights that were sent; push them again"
            )

    def forget(self, *, keep: WeightsSource | None) -> None:
        """Delete weights that were sent, except those of one version, and those of processes that are gone."""
        for process in self._folder.iterdir() if self._folder.is_dir() else ():
            if process.name != str(os.getpid()) and is_process(process.name):
                continue
            for folder in process.iterdir():
                if keep is None or process.name != str(os.getpid()) or folder.name != keep.upload:
                    shutil.rmtree(folder, ignore_errors=True)
            if not any(process.iterdir()):
                process.rmdir()


def is_process(name: str) -> bool:
    """True if a process of this id runs."""
    if not name.isdigit():
        return True  # nothing of ours
    try:
        os.kill(int(name), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
