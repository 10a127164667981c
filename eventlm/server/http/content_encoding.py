"""Decompresses bodies by the header `Content-Encoding`, in pieces of bounded size."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

from eventlm.server.errors import ApiError

#: Accepted encodings, beside `identity`.
ENCODINGS = ("gzip", "deflate")
_OTHER_NAMES = {"x-gzip": "gzip"}
#: Largest piece.
PIECE_BYTES = 256 * 1024


def body_decoder(headers: Sequence[str]) -> BodyDecoder | None:
    """The decoder for these headers `Content-Encoding`; None if the body is not compressed. Raises ApiError (415)."""
    named = [name.strip().lower() for header in headers for name in header.split(",")]
    names = [_OTHER_NAMES.get(name, name) for name in named if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in ENCODINGS:
        # By RFC 7694 the reply's Accept-Encoding lists the accepted encodings.
        taken = ", ".join(ENCODINGS)
        raise ApiError(
            415,
            f"The Content-Encoding must be one of {taken} and identity, or be left out.",
            headers={"Accept-Encoding": taken},
        )
    return BodyDecoder(names[0])


class BodyDecoder:
    """Decodes one body: `feed` its data, then `end`."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._stream: zlib._Decompress | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The pieces in `data`, which is not empty. Raises ApiError (400), also for a second gzip member."""
        if self._stream is None:
            self._stream = zlib.decompressobj(self._window(data))
        elif self._stream.eof:
            raise self._broken()
        try:
            # The rest of its input is in unconsumed_tail.
            while piece := self._stream.decompress(data, PIECE_BYTES):
                yield piece
                data = self._stream.unconsumed_tail
        except zlib.error as error:
            raise self._broken() from error
        if self._stream.unused_data:
            raise self._broken()

    def end(self) -> None:
        """End the body. Raises ApiError (400) if it is incomplete."""
        if self._stream is not None and not self._stream.eof:
            raise self._broken()

    def _window(self, data: bytes) -> int:
        """zlib's number for the format. Many clients send deflate without zlib's header, which begins with an 8."""
        if self._encoding == "gzip":
            return 16 + zlib.MAX_WBITS
        return zlib.MAX_WBITS if data[0] & 0xF == 8 else -zlib.MAX_WBITS

    def _broken(self) -> ApiError:
        return ApiError(
            400, f"The request body is broken: its Content-Encoding says {self._encoding}, and it is not that."
        )
