"""Define the form that uploads a file. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from scorepool.wire.file import ExpiresAfter


class UploadFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Read the fields of the form beside the file."""

    purpose: Annotated[Literal["batch"], Meta(description="Other purposes are not supported.")]
    expires_after: ExpiresAfter | None = None
