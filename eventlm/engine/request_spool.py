"""What an engine spools: with each segment all that lives, then what comes in, drain by drain."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.spool import SpoolWriter
from eventlm.engine.live_requests import LiveRequests
from eventlm.engine.request_registry import RequestRegistry
from eventlm.engine.spool.records import DrainRecords, KeptReply, Record, SpoolHead, encode_frame


class RequestSpool:
    """Makes the frames of a spool. trace: the run's folder. first_s: where its first segment begins. The rest
    is as SpoolHead has it.
    """

    def __init__(
        self,
        writer: SpoolWriter,
        live: LiveRequests,
        registry: RequestRegistry,
        *,
        trace: Path,
        boot_id: str,
        origin_ns: int,
        num_recoveries: int = 0,
        outputs_wait_for_syncs: bool = False,
        first_s: int = 0,
    ) -> None:
        self._writer = writer
        self._live = live
        self._registry = registry
        self._trace = trace
        self._boot_id = boot_id
        self._origin_ns = origin_ns
        self._num_recoveries = num_recoveries
        self._outputs_wait_for_syncs = outputs_wait_for_syncs
        self._records: list[Record] = []
        self.prepare(first_s)

    def add(self, record: Record) -> None:
        """Take the record of a fact that is about to be applied."""
        self._records.append(record)

    def take(self) -> list[bytes]:
        """The frame of this drain's records; none without any."""
        records, self._records = self._records, []
        return [encode_frame(DrainRecords(records))] if records else []

    def prepare(self, first_s: int) -> None:
        """A segment begins with event `first_s`: its file begins with all that lives. Between two drains only."""
        live = self._live
        head = SpoolHead(
            run=self._trace.name,
            trace=str(self._trace),
            boot_id=self._boot_id,
            origin_ns=self._origin_ns,
            first_s=first_s,
            digest_key=live.digest_key,
            block_names=live.keep_names(),
            workers=live.keep_workers(),
            num_recoveries=self._num_recoveries,
            outputs_wait_for_syncs=self._outputs_wait_for_syncs,
        )
        self._writer.prepare(first_s, [encode_frame(frame) for frame in (head, *kept_replies(live, self._registry))])

    def remove(self) -> None:
        """Remove all of it."""
        self._writer.remove()


def kept_replies(live: LiveRequests, registry: RequestRegistry) -> list[KeptReply]:
    """All that lives. Between two drains only."""
    replies = registry.keep(live)
    of_replies = {request for reply in replies for request in reply.requests}
    return replies + [KeptReply([live.keep(request)]) for request in live.requests if request not in of_replies]
