"""The objects of `/v1/files` and `/v1/batches`, as clients see them. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from eventlm.text.protocol import MetadataKey, MetadataValue

#: OpenAI's bounds: an hour and 30 days.
ExpirySeconds = Annotated[int, Meta(ge=3600, le=2_592_000)]
FilePurpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
#: The statuses of a batch that is over.
TERMINAL = ("failed", "completed", "expired", "cancelled")


class ExpiresAfter(Struct, frozen=True):
    """When a file is removed: so many seconds after it was made."""

    anchor: Literal["created_at"]
    seconds: ExpirySeconds


class FileObject(Struct, frozen=True, kw_only=True):
    """A file. purpose `batch`: uploaded as the input of a batch; `batch_output`: what a batch has made."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    status_details: str | None = None


class FileUpload(Struct, frozen=True, kw_only=True):
    """The form of an upload, for /openapi.json. `expires_after` is JSON, or fields such as `expires_after[anchor]`."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class FileDeleted(Struct, frozen=True):
    """Reply to the deletion of a file."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(Struct, frozen=True, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(Struct, frozen=True, kw_only=True):
    """What is wrong with a batch as a whole, or with a line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct, frozen=True):
    """A list of errors."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct, frozen=True):
    """Lines of a batch: all, and those that are over."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchInputTokens(Struct, frozen=True):
    """Input tokens that came from the prefix cache."""

    cached_tokens: int = 0


class BatchOutputTokens(Struct, frozen=True):
    """Output tokens that are reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all lines that are over."""

    input_tokens: int = 0
    input_tokens_details: BatchInputTokens = BatchInputTokens()
    output_tokens: int = 0
    output_tokens_details: BatchOutputTokens = BatchOutputTokens()
    total_tokens: int = 0


class BatchObject(Struct, frozen=True, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: dict[str, str] | None = None


class BatchList(Struct, frozen=True, kw_only=True):
    """A page of batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CreateBatchRequest(Struct, kw_only=True):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
