"""`/v1/files`: inputs of batches, uploaded to the disk piece by piece, and what batches have made."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta, Struct

from eventlm.errors import InputError, InvalidTypeError, MissingParameterError
from eventlm.server.auth.api_keys import PRINCIPAL
from eventlm.server.batches.folder import BATCHES, FileRecord, OwnerFolder, page
from eventlm.server.batches.objects import (
    TERMINAL,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    FilePurpose,
    FileUpload,
)
from eventlm.server.batches.results import write_all
from eventlm.server.context import CONTEXT, ServerContext, json_response, read_query
from eventlm.server.endpoints.openapi import Endpoint, Parameter
from eventlm.server.errors import ApiError
from eventlm.system.disk import WritableFile
from eventlm.text.decoding import convert_request

UPLOAD_TYPE = "multipart/form-data"
BYTES = "application/octet-stream"
#: So much of an upload must come within --body-timeout-seconds, and is written at once.
PIECE_BYTES = 1 << 20
#: Of a field of the form other than the file.
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 32
#: Transfer encodings of its parts that change nothing.
_PLAIN = ("7bit", "8bit", "binary")
MAX_NAME_LENGTH = 255
MAX_PAGE = 10_000
#: The system's errors when there is no more room.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SECONDS_PER_DAY = 86_400
T = TypeVar("T")


def owner_folder(request: web.Request) -> OwnerFolder:
    """What belongs to the request's key. Raises ApiError (404) if the server keeps no files."""
    folder = request.app.get(BATCHES)
    if folder is None:
        message = "This server keeps no files and runs no batches: start it with --batch-dir DIR."
        raise ApiError(404, message, code="batches_not_enabled")
    return folder.of(request[PRINCIPAL].owner)


async def on_disk(action: Callable[..., T], *arguments: object) -> T:
    """Call something that may wait for the disk, in a thread. Raises ApiError for the system's errors."""
    with disk_errors():
        return await asyncio.to_thread(action, *arguments)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn the system's errors into ApiError: 507 if there is no room."""
    try:
        yield
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        if error.errno in _FULL:
            message = f"The server has no room for this ({error.strerror}); delete files that you do not need."
            raise ApiError(507, message, type="server_error", code="disk_full", should_retry=False) from error
        message = f"The server cannot use its folder of files ({error.strerror or error})."
        raise ApiError(500, message, type="server_error", code="disk_error", should_retry=False) from error


class _Form(NamedTuple):
    """An upload that has arrived."""

    fields: dict[str, str]
    filename: str
    num_bytes: int


class _Query(Struct, kw_only=True):
    """The query of a list of files."""

    purpose: str | None = None
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    order: Literal["asc", "desc"] = "desc"


async def upload_file(request: web.Request) -> web.Response:
    """Upload the input of a batch as a form with the fields `purpose` (batch) and `file`."""
    context, folder = request.app[CONTEXT], owner_folder(request)
    limit = context.config.max_file_bytes
    if request.content_type != UPLOAD_TYPE:
        sent = request.headers.get("Content-Type", "")
        raise ApiError(415, f"The Content-Type must be {UPLOAD_TYPE}, got '{sent}'.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(
            415, "The Content-Encoding of an upload must be left out.", headers={"Accept-Encoding": "identity"}
        )
    if request.content_length is not None and request.content_length > limit + PIECE_BYTES:
        raise _too_large(limit)
    await on_disk(_make_room, context, folder, request.content_length or 0)
    file_id = folder.new_file_id()
    with disk_errors():
        file = await asyncio.to_thread(folder.disk.create, folder.upload(file_id))
        try:
            form = await _receive(request, context, partial(_write, folder, file))
            await asyncio.to_thread(file.sync)
            record = _file_record(context, file_id, form)
            await asyncio.to_thread(_keep, context, folder, record)
        except BaseException:
            folder.disk.unlink(folder.upload(file_id))
            raise
        finally:
            # Until then the lock shows that it is no remainder of a crash.
            file.close()
    return json_response(record.file)


def _make_room(context: ServerContext, folder: OwnerFolder, num_bytes: int) -> None:
    """Raise ApiError if one more file of this size would be too much."""
    folder.make()
    _check_number(context, folder)
    _check_storage(folder, folder.num_bytes, num_bytes)


def _check_number(context: ServerContext, folder: OwnerFolder) -> None:
    """Raise ApiError if there can be no more files."""
    most = context.config.batch_max_objects
    if len(folder.files()) >= most:
        raise ApiError(400, f"This key has {most} files, the most it may have: delete some.", code="too_many_files")


def _check_storage(folder: OwnerFolder, used: int, num_bytes: int) -> None:
    """Raise ApiError if so many bytes are too much beside those that are used."""
    limit = folder.max_bytes
    if used + num_bytes > limit:
        message = f"The files of this key may have {limit} bytes together, and have {used}: delete some."
        raise ApiError(400, message, code="storage_limit_exceeded")


def _write(folder: OwnerFolder, file: WritableFile, piece: bytes) -> None:
    """Write a piece of an upload, unless files and uploads together would be too much. One that is refused goes."""
    _check_storage(folder, folder.num_bytes, len(piece))
    write_all(file, piece)


def _keep(context: ServerContext, folder: OwnerFolder, record: FileRecord) -> None:
    # Others may have come meanwhile. What has not come as a whole takes no room away from this.
    _check_number(context, folder)
    _check_storage(folder, folder.num_kept_bytes, record.file.bytes)
    folder.disk.rename(folder.upload(record.file.id), folder.content(record.file.id))
    try:
        folder.add_file(record)
    except OSError:
        folder.remove_file(record.file.id)
        raise


def _file_record(context: ServerContext, file_id: str, form: _Form) -> FileRecord:
    """The record of an upload. Raises InputError for its fields."""
    purpose = form.fields.get("purpose")
    if purpose is None:
        raise MissingParameterError("purpose")
    if purpose != "batch":
        raise InputError("purpose", f"Invalid value for 'purpose': only 'batch' is supported here, got '{purpose}'.")
    now_ns = context.system.clock.unix_ns()
    created_at = now_ns // 1_000_000_000
    seconds = _expiry_seconds(form.fields) or context.config.batch_keep_days * SECONDS_PER_DAY
    file = FileObject(
        id=file_id,
        bytes=form.num_bytes,
        created_at=created_at,
        expires_at=created_at + seconds,
        filename=form.filename,
        purpose="batch",
    )
    return FileRecord(created_ns=now_ns, file=file)


def _expiry_seconds(fields: dict[str, str]) -> int:
    """Those of `expires_after`, which comes as `expires_after[seconds]` and so on, or as JSON; 0 if it is not given.

    Raises InputError.
    """
    name = "expires_after"
    raw: Any = {key: value for key in ("anchor", "seconds") if (value := fields.get(f"{name}[{key}]")) is not None}
    if raw.get("seconds", "").isdecimal():
        raw["seconds"] = int(raw["seconds"])
    try:
        raw = raw or msgspec.json.decode(fields.get(name, "null"))
    except msgspec.DecodeError as error:
        raise InputError(name, f"Invalid value for '{name}': expected a JSON object.") from error
    if raw is None:
        return 0
    if not isinstance(raw, dict):
        raise InvalidTypeError(name, f"Invalid type for '{name}': expected a JSON object.")
    try:
        return convert_request(raw, ExpiresAfter, {}).seconds
    except InputError as error:
        raise InputError(f"{name}.{error.param}", str(error).replace("'", f"'{name}.", 1)) from error


async def _receive(request: web.Request, context: ServerContext, write: Callable[[bytes], None]) -> _Form:
    """Write the form's file piece by piece as it comes. Raises ApiError or InputError."""
    fields: dict[str, str] = {}
    filename, num_bytes = None, 0
    try:
        parts = await request.multipart()
        for _ in range(_MAX_FIELDS):
            async with context.time_for_a_body():
                part = await parts.next()
            if part is None:
                break
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise ApiError(400, "The form is broken: each part must be a field with a name.")
            if part.headers.get("Content-Transfer-Encoding", "binary").lower() not in _PLAIN:
                raise ApiError(400, "The parts of the form must come as they are, without Content-Transfer-Encoding.")
            name = _in_unicode(part.name)
            if name != "file":
                fields[name] = await _field(name, part, context)
            elif filename is not None:
                raise InputError("file", "Invalid value for 'file': one file at a time.")
            else:
                filename = _in_unicode(part.filename or "file.jsonl")[:MAX_NAME_LENGTH]
                num_bytes = await _receive_file(part, context, write)
        else:
            raise ApiError(400, f"The form has more than {_MAX_FIELDS} fields.")
    except InputError:
        raise
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
        raise ApiError(400, "The form is broken: it does not follow its boundary or its Transfer-Encoding.") from error
    if filename is None:
        raise MissingParameterError("file")
    return _Form(fields, filename, num_bytes)


def _in_unicode(name: str) -> str:
    """A name from a header, of which bytes that are no UTF-8 came as lone surrogates."""
    return name.encode(errors="replace").decode()


async def _field(name: str, part: BodyPartReader, context: ServerContext) -> str:
    async with context.time_for_a_body():
        data = bytearray()
        while chunk := await part.read_chunk(_MAX_FIELD_BYTES):
            data += chunk
            if len(data) > _MAX_FIELD_BYTES:
                raise InputError(name, f"Invalid value for '{name}': it is too long.")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidTypeError(name, f"Invalid type for '{name}': expected a text in UTF-8.") from None


async def _receive_file(part: BodyPartReader, context: ServerContext, write: Callable[[bytes], None]) -> int:
    """The size of the file. Raises ApiError (413) for one that is too large."""
    limit, num_bytes = context.config.max_file_bytes, 0
    while True:
        piece = bytearray()
        async with context.time_for_a_body():
            while len(piece) < PIECE_BYTES and (chunk := await part.read_chunk(PIECE_BYTES - len(piece))):
                piece += chunk
        if not piece:
            break
        num_bytes += len(piece)
        if num_bytes > limit:
            raise _too_large(limit)
        await asyncio.to_thread(write, bytes(piece))
    return num_bytes


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The file is larger than the limit of {limit} bytes (--max-file-bytes).")


async def list_files(request: web.Request) -> web.Response:
    """The files of the key, the newest first unless `order` is `asc`."""
    folder, query = owner_folder(request), read_query(request, _Query)
    records = await on_disk(folder.files)
    if query.purpose is not None:
        records = [record for record in records if record.file.purpose == query.purpose]
    if query.order == "desc":
        records.reverse()
    found, has_more = page(records, [record.file.id for record in records], query.after, query.limit)
    data = [record.file for record in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


async def get_file(request: web.Request) -> web.Response:
    """A file's object."""
    record = await on_disk(owner_folder(request).file, request.match_info["id"])
    return json_response(record.file)


async def delete_file(request: web.Request) -> web.Response:
    """Delete a file, unless a batch that is not over needs it."""
    file_id = request.match_info["id"]
    await on_disk(_delete, owner_folder(request), file_id)
    return json_response(FileDeleted(file_id))


def _delete(folder: OwnerFolder, file_id: str) -> None:
    folder.file(file_id)
    for record in folder.batches():
        if record.batch.input_file_id == file_id and record.batch.status not in TERMINAL:
            message = f"The file is the input of {record.batch.id}, which is not over: cancel that first."
            raise ApiError(409, message, param="id", code="file_in_use", should_retry=False)
    folder.remove_file(file_id)


async def get_file_content(request: web.Request) -> web.StreamResponse:
    """The content of a file."""
    folder, file_id = owner_folder(request), request.match_info["id"]
    record = await on_disk(folder.file, file_id)
    file = await on_disk(folder.disk.open, folder.content(file_id))
    try:
        response = web.StreamResponse(headers={"Content-Type": BYTES, "Content-Length": str(record.file.bytes)})
        await response.prepare(request)
        timeout = request.app[CONTEXT].config.write_timeout_seconds
        while request.method != "HEAD" and (piece := await asyncio.to_thread(file.read, PIECE_BYTES)):
            try:
                async with asyncio.timeout(timeout):
                    await response.write(piece)
            except TimeoutError as error:
                raise ConnectionResetError("the client reads nothing") from error
        await response.write_eof()
        return response
    finally:
        file.close()


_AFTER = Parameter("after", "query", str, "the id of the last object of the page before")

FILE_ENDPOINTS = (
    Endpoint("POST", "/v1/files", upload_file, FileUpload, FileObject, body_type=UPLOAD_TYPE, errors=(507,)),
    Endpoint(
        "GET",
        "/v1/files",
        list_files,
        reply=FileList,
        errors=(404,),
        parameters=(
            Parameter("purpose", "query", FilePurpose, "only files of this purpose"),
            _AFTER,
            Parameter("limit", "query", int, f"1 to {MAX_PAGE}"),
            Parameter("order", "query", Literal["asc", "desc"], "by the time of creation; desc unless given"),
        ),
    ),
    Endpoint("GET", "/v1/files/{id}", get_file, reply=FileObject),
    Endpoint("DELETE", "/v1/files/{id}", delete_file, reply=FileDeleted, errors=(409, 507)),
    Endpoint("GET", "/v1/files/{id}/content", get_file_content, media_types=(BYTES,)),
)
