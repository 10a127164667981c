"""The header of a GGUF file: metadata, and where its tensors lie. Nothing in the file is trusted.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes the format. Every length is checked against what is
left of the file, and against limits, before anything of that length is read. gguf-py's own reader maps the file and
takes its lengths as they are.
"""

from __future__ import annotations

import math
import re
import stat
import struct
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, Keys
from msgspec import Struct

from eventlm.errors import CheckpointError
from eventlm.models.checkpoint.safetensors_header import FileStamp, not_downloaded
from eventlm.models.gguf.source import GgufTensor

MAGIC = b"GGUF"
#: Types of tensors that can be run.
TENSOR_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)

#: Limits that no model comes near, so that a damaged file is refused before much of it is read.
_MAX_HEADER_BYTES = 256 << 20
_MAX_KEYS, _MAX_TENSORS, _MAX_ELEMENTS = 1 << 14, 1 << 16, 1 << 22
_MAX_NAME_BYTES = 1 << 16
_MAX_DIMENSIONS = 4
_VERSIONS = (2, 3)
_READ_BYTES = 1 << 20
#: Longest beginning of a name that an error quotes.
_QUOTED_CHARACTERS = 80
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", list: "an array"}


class GgufHeader(Struct, frozen=True):
    """A file's header: its raw bytes, the metadata by key, the tensors in the order of their data."""

    path: Path
    stamp: FileStamp
    raw: bytes
    metadata: dict[str, Any]
    tensors: list[GgufTensor]

    def get(self, key: str, kind: type[Any], default: Any = None) -> Any:
        """A value of the metadata, of int, float, str, bool or list. CheckpointError if it is of another kind."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            found = _KINDS[type(value)]
            raise CheckpointError(f"{self.path}: key {key} is {found}, it must be {_KINDS[kind]}; take another file")
        return value

    def need(self, key: str, kind: type[Any]) -> Any:
        """Like `get`, but CheckpointError if there is no such key."""
        value = self.get(key, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: key {key} is missing; the file is not a model that can be run")
        return value


def part_paths(path: Path) -> list[Path]:
    """The files of the model that `path` is a part of, by their names. CheckpointError if one is not there."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    paths = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, count + 1)]
    for number, part in enumerate(paths, 1):
        if not part.exists():
            raise CheckpointError(f"{part}: part {number} of {count} is missing; download it into the same folder")
    return paths or [path]


def read_parts(paths: Sequence[Path]) -> list[GgufHeader]:
    """The headers of a model's files. CheckpointError if they are not, all and alone, the parts of one model."""
    headers = [read_header(path) for path in paths]
    for number, header in enumerate(headers):
        count = header.get(Keys.Split.LLM_KV_SPLIT_COUNT, int, 1)
        found = header.get(Keys.Split.LLM_KV_SPLIT_NO, int, 0)
        if (found, count) != (number, len(paths)):
            raise CheckpointError(
                f"{header.path}: by its metadata it is part {found + 1} of {count}, by its name part {number + 1} of "
                f"{len(paths)}; give the parts the names they were downloaded with, -00001-of-00002.gguf and so on"
            )
    _check_whole(headers)
    return headers


def read_header(path: Path) -> GgufHeader:
    """The header of one file. Raises CheckpointError, with the place, for anything that is not as it must be."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: not a file; give a GGUF file")
        with path.open("rb") as file:
            stamp = FileStamp.of(file.fileno())
            return _Parser(path, file, stamp).header()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error


def read_floats(header: GgufHeader, tensor: GgufTensor) -> tuple[float, ...]:
    """The values of a small vector of type F32."""
    try:
        with header.path.open("rb") as file:
            file.seek(tensor.offset)
            data = file.read(tensor.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{header.path}: {error.strerror or error}") from error
    if len(data) != tensor.num_bytes:
        raise CheckpointError(f"{header.path}: tensor {tensor.name} is cut short; download it again")
    return struct.unpack(f"<{tensor.num_bytes // 4}f", data)


def _check_whole(headers: Sequence[GgufHeader]) -> None:
    first = headers[0]
    seen: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in seen:
                raise CheckpointError(
                    f"{header.path}: tensor {tensor.name} is in {seen[tensor.name].name} too; the parts are not of "
                    "one model"
                )
            seen[tensor.name] = header.path
    expected = first.get(Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT, int, len(seen))
    if expected != len(seen):
        raise CheckpointError(
            f"{first.path}: its parts have {len(seen)} tensors, by its metadata they have {expected}; the parts are "
            "not of one model"
        )


class _Parser:
    """Reads a header from the file's start on. `_where` is what is being read, in the words of an error."""

    def __init__(self, path: Path, file: BufferedReader, stamp: FileStamp) -> None:
        self._path, self._file, self._stamp = path, file, stamp
        self._read, self._position = bytearray(), 0
        self._where = "the start"

    def header(self) -> GgufHeader:
        self._start()
        num_tensors = self._count("tensors", _MAX_TENSORS)
        num_keys = self._count("keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for number in range(num_keys):
            self._where = f"key {number + 1} of {num_keys}"
            key = self._name()
            if key in metadata:
                self._refuse(f"key {quoted(key)} is there twice")
            self._where = f"key {quoted(key)}"
            metadata[key] = self._value()
        alignment = self._alignment(metadata)
        tensors: dict[str, GgufTensor] = {}
        for number in range(num_tensors):
            self._where = f"tensor {number + 1} of {num_tensors}"
            tensor = self._tensor(alignment)
            if tensor.name in tensors:
                self._refuse(f"tensor {quoted(tensor.name)} is there twice")
            tensors[tensor.name] = tensor
        raw = bytes(self._read[: self._position])
        return GgufHeader(self._path, self._stamp, raw, metadata, list(self._placed(tensors.values(), alignment)))

    def _start(self) -> None:
        self._fill(24)
        start = bytes(self._read[:24])
        if not start.startswith(MAGIC):
            why = not_downloaded(start) or f"this is not a GGUF file: it begins with {start[:4]!r}, not {MAGIC!r}"
            raise CheckpointError(f"{self._path}: {why}")
        self._position = len(MAGIC)
        version: int = self._scalar("I")
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                why = "its numbers are big-endian, and only little-endian files can be read"
            else:
                why = f"GGUF version {version} is not supported (supported: {', '.join(map(str, _VERSIONS))})"
            raise CheckpointError(f"{self._path}: {why}; take or make another file of the model")

    def _count(self, what: str, limit: int) -> int:
        self._where = f"the number of {what}"
        count: int = self._scalar("Q")
        if count > limit:
            self._refuse(f"it has {count:,} {what}, and at most {limit:,} are possible")
        return count

    def _value(self) -> Any:
        kind = self._kind()
        if kind == GGUFValueType.STRING:
            return self._string(_MAX_HEADER_BYTES)
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        kind = self._kind()
        if kind == GGUFValueType.ARRAY:
            self._refuse(f"{self._where} is an array of arrays")
        count: int = self._scalar("Q")
        if count > _MAX_ELEMENTS:
            self._refuse(f"{self._where} has {count:,} elements, and at most {_MAX_ELEMENTS:,} are possible")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        code = _SCALARS[kind]
        data = self._take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", data))

    def _kind(self) -> GGUFValueType:
        number: int = self._scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            self._refuse(f"{self._where} has a value of type {number}, which does not exist")

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get(Keys.General.ALIGNMENT, 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            self._refuse(f"key {Keys.General.ALIGNMENT} is {alignment!r:.40}, it must be a power of two from 8 on")
        return alignment

    def _tensor(self, alignment: int) -> GgufTensor:
        """A tensor with its offset from the start of the data."""
        name = self._name()
        self._where = f"tensor {quoted(name)}"
        num_dimensions: int = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"{self._where} has {num_dimensions:,} dimensions, and 1 to {_MAX_DIMENSIONS} are possible")
        sizes = [self._scalar("Q") for _ in range(num_dimensions)]
        number: int = self._scalar("I")
        offset: int = self._scalar("Q")
        type_name, block, block_bytes = self._type(number)
        if min(sizes) == 0 or math.prod(sizes) > self._stamp.num_bytes * block:
            self._refuse(f"{self._where} has the sizes {sizes}, which the file's {self._stamp.num_bytes:,} bytes deny")
        if sizes[0] % block:
            self._refuse(f"{self._where} has rows of {sizes[0]}, and {type_name} has blocks of {block}")
        if offset % alignment:
            self._refuse(f"{self._where} is at {offset:,}, which is no multiple of {alignment}")
        return GgufTensor(name, type_name, tuple(reversed(sizes)), offset, math.prod(sizes) // block * block_bytes)

    def _type(self, number: int) -> tuple[str, int, int]:
        """Name of a tensor's type, elements of its blocks, and bytes of one."""
        try:
            found = GGMLQuantizationType(number)
        except ValueError:
            self._refuse(f"{self._where} has type {number}, which is not known here")
        if found.name not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self._path}: {self._where} is of type {found.name}, which cannot be run (supported: "
                f"{', '.join(TENSOR_TYPES)}); take another file of the model, such as Q4_K_M"
            )
        return found.name, *GGML_QUANT_SIZES[found]

    def _placed(self, tensors: Iterable[GgufTensor], alignment: int) -> Iterator[GgufTensor]:
        """The tensors with their places in the file, which must not overlap or end after it."""
        start, end, before = -(-self._position // alignment) * alignment, 0, ""
        for tensor in sorted(tensors, key=lambda each: each.offset):
            if tensor.offset < end:
                self._refuse(f"tensors {quoted(before)} and {quoted(tensor.name)} overlap")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
            if start + end > self._stamp.num_bytes:
                self._refuse(
                    f"tensor {quoted(before)} ends at {start + end:,}, the file at {self._stamp.num_bytes:,} bytes"
                )
            yield msgspec.structs.replace(tensor, offset=start + tensor.offset)

    def _name(self) -> str:
        name = self._string(_MAX_NAME_BYTES)
        if not name:
            self._refuse(f"{self._where} has no name")
        return name

    def _string(self, limit: int) -> str:
        num_bytes: int = self._scalar("Q")
        if num_bytes > limit:
            self._refuse(f"{self._where}: a string has {num_bytes:,} bytes, and at most {limit:,} are possible")
        return self._text(self._take(num_bytes))

    def _text(self, data: bytes | bytearray) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            self._refuse(f"{self._where}: a string is not UTF-8: {error.reason}")

    def _strings(self, count: int) -> list[str]:
        """So many strings. A vocabulary has some hundred thousand, so they are read without a call for each number."""
        strings: list[str] = []
        while len(strings) < count:
            self._fill(_READ_BYTES)
            read, position = self._read, self._position
            for _ in range(count - len(strings)):
                start = position + 8
                end = start + int.from_bytes(read[position:start], "little")
                if start > len(read) or end > len(read):
                    break
                strings.append(self._text(read[start:end]))
                position = end
            if position == self._position:
                # The next one is longer than what is read at once, or goes on after the file.
                strings.append(self._string(_MAX_HEADER_BYTES))
            else:
                self._position = position
        return strings

    def _scalar(self, code: str) -> Any:
        [value] = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))
        return value

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end <= self._stamp.num_bytes:
            self._fill(num_bytes)
        if end > len(self._read):
            self._refuse(
                f"{self._where} goes on from byte {self._position:,} to {end:,}, and the file has "
                f"{self._stamp.num_bytes:,} bytes"
            )
        data = bytes(self._read[self._position : end])
        self._position = end
        return data

    def _fill(self, num_bytes: int) -> None:
        """Have so many more bytes, or what is left of the file."""
        end = min(self._position + num_bytes, self._stamp.num_bytes)
        if end > _MAX_HEADER_BYTES:
            self._refuse(f"{self._where}: the header is longer than {_MAX_HEADER_BYTES:,} bytes")
        if end > len(self._read):
            self._read += self._file.read(max(end - len(self._read), _READ_BYTES))

    def _refuse(self, why: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: cut short or damaged: {why}; download it again")


def quoted(name: str) -> str:
    """A name of the file in an error: one line, and not too long."""
    cut = name if len(name) <= _QUOTED_CHARACTERS else name[:_QUOTED_CHARACTERS] + "…"
    return cut if cut.isprintable() else repr(cut)
