"""Define files as the API shows them: the input and output of batches. The fields are OpenAI's."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

FILE_KEPT_S = 30 * 86_400  # by default

Purpose = Literal["batch", "batch_output"]
LastId = Annotated[str | None, Meta(description="Pass it as `after` to get the next page.")]


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Set how long a file is kept."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=FILE_KEPT_S)]


class FileObject(Struct, frozen=True, kw_only=True):
    """Describe a file. Times are whole seconds since 1970."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Annotated[
        Literal["uploaded", "processed"], Meta(description="uploaded: the output of a running batch, which grows.")
    ] = "processed"
    num_lines: Annotated[int | None, Meta(description="null: an older release wrote the file.")] = None


class FilePage(Struct, frozen=True, kw_only=True):
    """List files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: LastId
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    """Confirm that a file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
