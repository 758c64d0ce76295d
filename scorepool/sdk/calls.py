"""Describe every call of the API as data. Pure: sends nothing."""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import BinaryIO, Generic, TypeVar
from urllib.parse import quote

from scorepool import wire

T = TypeVar("T")
MSGPACK = "application/msgpack"
NO_HEADERS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Form:
    """A form with a file, which is read while it is sent."""

    filename: str
    file: BinaryIO
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request.

    It may be repeated after a lost connection or a reply that leaves open whether it was done, unless the API would do
    twice what it asks for. Submissions may: the API makes no second job of the same Idempotency-Key.
    """

    method: str
    path: str
    decode: Callable[[bytes], T]
    content: bytes | None = None
    form: Form | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, str | int | float] = field(default_factory=dict)
    wait_s: float = 0.0  # that the API may take to answer
    job_id: str | None = None  # the job that it is about
    may_repeat: bool = True

    @property
    def name(self) -> str:
        """Say what it asks for: method and path."""
        return f"{self.method} {self.path}"


def _part(name: str) -> str:
    """Return a part of a path, whatever characters it has. Raises TypeError."""
    if not isinstance(name, str):
        raise TypeError(f"expected an id, a str, found {wire.quote(repr(name))}")
    return quote(name, safe="")


def _decode(reply_type: type[T], content: bytes) -> T:
    return wire.parse(content, reply_type, "msgpack")


def _nothing(content: bytes) -> None:
    del content


def _accepted(content: bytes) -> list[wire.Accepted]:
    return [_decode(wire.Accepted, content)]


def _call(
    reply_type: type[T], method: str, path: str, *, body: object = None, **params: str | int | float | None
) -> Call[T]:
    """Build a call without a job. A POST is not repeated."""
    content = None if body is None else wire.encode(body)
    given = {name: value for name, value in params.items() if value is not None}
    decode = partial(_decode, reply_type)
    return Call(method, path, decode, content=content, params=given, may_repeat=method != "POST")


# Jobs.


def submit(request: wire.Request, idempotency_key: str | None = None) -> Call[list[wire.Accepted]]:
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return Call("POST", "/v1/jobs", _accepted, content=wire.encode(request), headers=headers)


def submit_many(requests: Iterable[wire.Request], idempotency_key: str | None = None) -> Call[list[wire.Accepted]]:
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    decode = partial(_decode, list[wire.Accepted])
    return Call("POST", "/v1/jobs/bulk", decode, content=wire.encode(list(requests)), headers=headers)


def job(job_id: str, wait_s: float = 0.0) -> Call[wire.Job]:
    params = {"wait": wait_s} if wait_s else {}
    decode = partial(_decode, wire.Job)
    return Call("GET", f"/v1/jobs/{_part(job_id)}", decode, params=params, wait_s=wait_s, job_id=job_id)


def ended_jobs(job_ids: Sequence[str], wait_s: float) -> Call[list[wire.Job]]:
    """Ask for the jobs at the start of the list that have ended, of at most wire.MAX_ENDED_JOBS."""
    params: dict[str, str | float] = {"ids": ",".join(map(_part, job_ids)), "wait": wait_s}
    decode = partial(_decode, list[wire.Job])
    return Call("GET", "/v1/jobs/ended", decode, params=params, wait_s=wait_s, job_id=job_ids[0])


def jobs(**filters: str | int | float | None) -> Call[wire.JobPage]:
    return _call(wire.JobPage, "GET", "/v1/jobs", **filters)


def cancel(job_id: str) -> Call[wire.Job]:
    return Call("POST", f"/v1/jobs/{_part(job_id)}/cancel", partial(_decode, wire.Job), job_id=job_id)


def delete(job_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/jobs/{_part(job_id)}", _nothing, job_id=job_id)


def events(job_id: str, last_event_id: str) -> Call[None]:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": last_event_id}
    return Call("GET", f"/v1/jobs/{_part(job_id)}/events", _nothing, headers=headers, job_id=job_id)


# Models.


def models() -> Call[wire.ModelList]:
    return _call(wire.ModelList, "GET", "/v1/models")


def model(name: str) -> Call[wire.Model]:
    return _call(wire.Model, "GET", f"/v1/models/{quote(name)}")


def weights(model: str) -> Call[wire.WeightsState]:
    return _call(wire.WeightsState, "GET", f"/v1/models/{quote(model)}/weights")


def push_weights(
    model: str,
    pushed: str | os.PathLike[str] | bytes,
    version: int | None,
    label: str | None,
    on_running: wire.OnRunning,
    wait_s: float,
) -> Call[wire.WeightsState]:
    path = f"/v1/models/{quote(model)}/weights"
    if not isinstance(pushed, bytes):
        body = wire.PushWeights(path=os.fspath(pushed), version=version, label=label, on_running=on_running)
        return replace(_call(wire.WeightsState, "POST", path, body=body, wait=wait_s), wait_s=wait_s)
    call = _call(wire.WeightsState, "POST", path, version=version, label=label, on_running=on_running, wait=wait_s)
    return replace(call, content=pushed, headers={"Content-Type": "application/octet-stream"}, wait_s=wait_s)


def load_adapter(name: str, path: str, model: str | None, replaces: bool) -> Call[None]:
    body = wire.LoadAdapter(lora_name=name, lora_path=path, model=model, load_inplace=replaces)
    headers = {"Content-Type": "application/json"}
    return Call(
        "POST",
        "/v1/load_lora_adapter",
        _nothing,
        wire.encode_json(body),
        headers=headers,
        wait_s=130.0,
        may_repeat=False,
    )


def unload_adapter(name: str, model: str | None) -> Call[None]:
    body = wire.UnloadAdapter(lora_name=name, model=model)
    headers = {"Content-Type": "application/json"}
    return Call(
        "POST",
        "/v1/unload_lora_adapter",
        _nothing,
        wire.encode_json(body),
        headers=headers,
        wait_s=130.0,
        may_repeat=False,
    )


def tokenizer_info(model: str | None) -> Call[wire.TokenizerInfo]:
    return _call(wire.TokenizerInfo, "GET", "/tokenizer_info", model=model)


def health() -> Call[wire.Ready]:
    return _json_call(wire.Ready, "GET", "/health")


def metrics() -> Call[str]:
    return Call("GET", "/metrics", bytes.decode)


# Files and batches, whose replies are always JSON.


def _json_call(
    reply_type: type[T], method: str, path: str, *, body: object = None, **params: str | int | None
) -> Call[T]:
    call = _call(reply_type, method, path, body=body, **params)
    return replace(call, decode=partial(wire.parse, message_type=reply_type, message_format="json"))


def upload_file(filename: str, file: BinaryIO, expires_after_s: int | None) -> Call[wire.FileObject]:
    fields = {"purpose": "batch"}
    if expires_after_s is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
    headers = {"Content-Type": f"multipart/form-data; boundary={uuid.uuid4().hex}"}
    call = _json_call(wire.FileObject, "POST", "/v1/files")
    # Repeated, it may leave a file that no batch uses, which is deleted in time.
    return replace(call, form=Form(filename, file, fields), headers=headers, may_repeat=True)


def files(purpose: wire.Purpose | None, order: str, after: str | None, limit: int) -> Call[wire.FilePage]:
    return _json_call(wire.FilePage, "GET", "/v1/files", purpose=purpose, order=order, after=after, limit=limit)


def file(file_id: str) -> Call[wire.FileObject]:
    return _json_call(wire.FileObject, "GET", f"/v1/files/{_part(file_id)}")


def file_content(file_id: str, offset: int) -> Call[None]:
    return Call("GET", f"/v1/files/{_part(file_id)}/content", _nothing, params={"offset": offset})


def delete_file(file_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/files/{_part(file_id)}", _nothing)


def create_batch(batch: wire.CreateBatch) -> Call[wire.Batch]:
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    return replace(_json_call(wire.Batch, "POST", "/v1/batches", body=batch), headers=headers, may_repeat=True)


def batches(after: str | None, limit: int) -> Call[wire.BatchPage]:
    return _json_call(wire.BatchPage, "GET", "/v1/batches", after=after, limit=limit)


def batch(batch_id: str) -> Call[wire.Batch]:
    return _json_call(wire.Batch, "GET", f"/v1/batches/{_part(batch_id)}")


def cancel_batch(batch_id: str) -> Call[wire.Batch]:
    return replace(_json_call(wire.Batch, "POST", f"/v1/batches/{_part(batch_id)}/cancel"), may_repeat=True)


# Webhooks.


def endpoints() -> Call[wire.WebhookEndpointList]:
    return _call(wire.WebhookEndpointList, "GET", "/v1/webhooks/endpoints")


def endpoint(endpoint_id: str) -> Call[wire.WebhookEndpoint]:
    return _call(wire.WebhookEndpoint, "GET", f"/v1/webhooks/endpoints/{_part(endpoint_id)}")


def register_endpoint(registration: wire.EndpointRegistration) -> Call[wire.WebhookSecret]:
    return _call(wire.WebhookSecret, "POST", "/v1/webhooks/endpoints", body=registration)


def change_endpoint(endpoint_id: str, change: wire.EndpointChange) -> Call[wire.WebhookEndpoint]:
    return _call(wire.WebhookEndpoint, "PATCH", f"/v1/webhooks/endpoints/{_part(endpoint_id)}", body=change)


def delete_endpoint(endpoint_id: str) -> Call[None]:
    return Call("DELETE", f"/v1/webhooks/endpoints/{_part(endpoint_id)}", _nothing)


def rotate_endpoint_secret(endpoint_id: str) -> Call[wire.WebhookSecret]:
    return _call(wire.WebhookSecret, "POST", f"/v1/webhooks/endpoints/{_part(endpoint_id)}/secret")


def webhook_secret() -> Call[wire.JobWebhookSecret]:
    return _call(wire.JobWebhookSecret, "GET", "/v1/webhooks/secret")


def rotate_webhook_secret() -> Call[wire.JobWebhookSecret]:
    return _call(wire.JobWebhookSecret, "POST", "/v1/webhooks/secret")


def send_test_event(endpoint_id: str) -> Call[wire.Delivery]:
    return _call(wire.Delivery, "POST", "/v1/webhooks/test", body=wire.TestEventRequest(endpoint_id=endpoint_id))


def deliveries(
    state: wire.DeliveryState | None, endpoint_id: str | None, cursor: str | None, limit: int
) -> Call[wire.DeliveryPage]:
    path = "/v1/webhooks/deliveries"
    return _call(wire.DeliveryPage, "GET", path, state=state, endpoint_id=endpoint_id, cursor=cursor, limit=limit)


def delivery(delivery_id: str) -> Call[wire.Delivery]:
    return _call(wire.Delivery, "GET", f"/v1/webhooks/deliveries/{_part(delivery_id)}")


def replay_delivery(delivery_id: str) -> Call[wire.Delivery]:
    return _call(wire.Delivery, "POST", f"/v1/webhooks/deliveries/{_part(delivery_id)}/replay")


def replay_deliveries(since: float, endpoint_id: str | None) -> Call[wire.ReplayReply]:
    body = wire.ReplayRequest(since=since, endpoint_id=endpoint_id)
    return _call(wire.ReplayReply, "POST", "/v1/webhooks/deliveries/replay", body=body)
