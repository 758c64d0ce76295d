"""OpenAI's file objects, with the fields that batches need. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

FILE_KEPT_S = 30 * 86_400  # by default

Purpose = Literal["batch", "batch_output"]


class ExpiresAfter(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=FILE_KEPT_S)]


class UploadFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The form's fields beside the file."""

    purpose: Annotated[Literal["batch"], Meta(description="Other purposes are not supported.")]
    expires_after: ExpiresAfter | None = None


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"


class FilePage(Struct, frozen=True, kw_only=True):
    """Pass `last_id` as `after` for the page that follows."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
