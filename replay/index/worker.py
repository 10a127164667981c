"""The process that indexes one segment: `python -m eventlm.replay.index.worker`.

It reads a `PartRequest` as JSON, writes the index to the file that this names, and answers with a `PartResponse`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec
import xxhash
from msgspec import structs

from eventlm.bus.log_reader import LogReader
from eventlm.core.core import Core
from eventlm.errors import EventLMError
from eventlm.events import Header, Snapshot
from eventlm.replay.index.file import IndexContent, IndexFacts, write_index
from eventlm.replay.index.indexer import Indexer
from eventlm.replay.index.segments import PartRequest, PartResponse
from eventlm.replay.rebuild import Changes, rebuild
from eventlm.replay.verify.verifier import Found, Verifier


def respond(request: PartRequest) -> PartResponse:
    """Index the segment. Whatever is wrong with it, the caller finds out by reading the whole run."""
    try:
        with LogReader(request.segment) as reader:
            rebuilt = rebuild(reader.header, Changes(trust_local_plugins=request.trust_local_plugins))
            verifier = Verifier(rebuilt, reader.header)
            indexer = Indexer(reader.header, verifier)
            state_at_start = b""
            for line in reader:
                indexer.feed(line)
                if line.tag == "snapshot":
                    event = line.event()
                    assert isinstance(event, Snapshot)
                    state_at_start = bytes(event.state)
            is_whole = not verifier.expected and reader.torn is None
            facts = IndexFacts(
                first_s=reader.header.s,
                next_s=indexer.next_s,
                last_ns=indexer.last_ns,
                last_h=reader.last_h,
                num_bytes=reader.size_bytes,
                is_verified=True,
            )
    except (EventLMError, Found, IndexError):
        return PartResponse()
    content = IndexContent(facts=facts, names=indexer.names.names, tables=indexer.tables(), snapshots=indexer.snapshots)
    write_index(Path(request.output), content)
    return PartResponse(
        is_whole=is_whole,
        state_at_start=_hash(state_at_start),
        state_at_end=_hash(_state_for_next(verifier.core, reader.header)) if is_whole else "",
        next_s=facts.next_s,
        last_ns=facts.last_ns,
        last_h=facts.last_h,
    )


def _state_for_next(core: Core, header: Header) -> bytes:
    """The state that the snapshot of the next segment has to have: it follows that segment's header."""
    core.apply(structs.replace(header, s=core.next_seq, ts=core.state.now_ns, c=0))
    return core.snapshot()


def _hash(state: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(state)


def main() -> None:
    """Respond to one request."""
    # Ctrl-C is for the parent process, which ends this one. The output of plug-ins must not mix with the response.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=PartRequest)
        output.write(msgspec.json.encode(respond(request)))


if __name__ == "__main__":
    main()
