"""Serve one path that two servers have with different bodies. Pure."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from scorepool import wire
from scorepool.api.dialects.protocol import Chat, Context, Endpoint, EventWriter, JobCount


class EitherEndpoint(Endpoint[Any]):
    """Pass each body to the endpoint whose it is. A subclass describes the route, and tells the bodies apart."""

    @abstractmethod
    def endpoint_for(self, body: bytes, message_format: wire.Format) -> Endpoint[Any]:
        """Return the endpoint that parses a body: any of the two if none could, which then says what is wrong."""

    @abstractmethod
    def endpoint_of(self, body: object) -> Endpoint[Any]:
        """Return the endpoint that has parsed a body."""

    def parse(self, body: bytes, message_format: wire.Format = "json") -> Any:
        return self.endpoint_for(body, message_format).parse(body, message_format)

    def clamp_top_logprobs(self, body: Any, cap: int) -> Any:
        return self.endpoint_of(body).clamp_top_logprobs(body, cap)

    def job_count(self, body: Any) -> JobCount:
        return self.endpoint_of(body).job_count(body)

    def texts_to_encode(self, body: Any, served_model: wire.ServedModel) -> Iterable[str | Chat]:
        return self.endpoint_of(body).texts_to_encode(body, served_model)

    def to_requests(self, body: Any, context: Context) -> Iterable[wire.Request]:
        return self.endpoint_of(body).to_requests(body, context)

    def to_reply(self, body: Any, results: Sequence[wire.Result], context: Context) -> object:
        return self.endpoint_of(body).to_reply(body, results, context)

    def is_streamed(self, body: Any) -> bool:
        return self.endpoint_of(body).is_streamed(body)

    def to_events(self, body: Any, job_ids: Sequence[str], context: Context) -> EventWriter:
        return self.endpoint_of(body).to_events(body, job_ids, context)

    def field_name(self, body: Any, field: str) -> str:
        return self.endpoint_of(body).field_name(body, field)
