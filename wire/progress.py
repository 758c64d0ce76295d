"""Define how far a job of many items is, while it runs."""

from typing import Annotated

from msgspec import Meta, Struct


class Progress(Struct, frozen=True, kw_only=True):
    """Report how far a score or classify job is. About one a second is sent; each has all that is known.

    When a job runs again, because its worker died or was away, its numbers begin again.
    """

    id: Annotated[str, Meta(description="Id of the job.")]
    run: Annotated[int, Meta(description="Run of the job: a later run has a greater number.")]
    num_items: Annotated[int, Meta(ge=0)]
    num_items_done: Annotated[int, Meta(ge=0, description="Items that were computed, and those that failed alone.")]
    num_tokens: Annotated[int, Meta(ge=0, description="Tokens of all items: prompts and completions.")]
    num_tokens_done: Annotated[int, Meta(ge=0, description="Tokens that were computed or are being computed.")]


Progresses = list[Progress]  # one stream entry: every job of a worker that advanced
