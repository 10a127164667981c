"""How a rank meets the others of its replica: over the memory of one host where that can be, else over Gloo."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from eventlm.core.shards import Place
from eventlm.errors import UsageError
from eventlm.kernels.cpu.meeting import SHARED_SPIN_US, SPIN_US, slot_bytes_for
from eventlm.kernels.cpu.native import available_builds
from eventlm.models.spec import ModelSpec
from eventlm.system.processors import usable_cores
from eventlm.worker.protocol import WorkerSetup
from eventlm.worker.ranks.exchange import RankExchange
from eventlm.worker.ranks.gloo import GlooExchange, GlooReceiver, GlooSender, GlooStore
from eventlm.worker.ranks.hand_over import HandOverReceiver, HandOverSender, SharedReceiver, SharedSender
from eventlm.worker.ranks.kv_group import KVGroup
from eventlm.worker.ranks.shard import group_slot_bytes
from eventlm.worker.ranks.shared_memory import SharedMemoryExchange
from eventlm.worker.ranks.stage import Stage


class Connections:
    """Of the rank that `setup` describes. Raises PeerLostError, and UsageError if what is shared finds no room."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._layout = setup.layout
        self._place = setup.layout.place_of(setup.rank)
        #: Once something goes over Gloo. The first rank's is for those of other hosts, too.
        self._store: GlooStore | None = None
        if setup.peers.address and setup.rank == 0:
            self._store = self._open_store()

    def exchange(self, hidden_size: int, most_vocab_rows: int, *, at_once: int | None = None) -> RankExchange | None:
        """With the other tensor ranks of its stage and KV group, once all are there; None if there are none.

        most_vocab_rows: that one of them has. at_once: bytes that a meeting exchanges at most, where what is more may
        take several.
        """
        size = self._layout.tensor
        if size == 1:
            return None
        setup, place = self._setup, self._place
        slot_bytes = slot_bytes_for(setup.max_num_batched_tokens, hidden_size, most_vocab_rows)
        peers = [self._layout.rank_at(place._replace(tensor=number)) for number in range(size)]
        return self._meet(self._tensor_group, peers, min(slot_bytes, at_once or slot_bytes))

    def store(self) -> Store:
        """Where the ranks of `exchange` can make another one."""
        return self._whole_store().part(self._tensor_group)

    @property
    def _tensor_group(self) -> str:
        return f"tensor-{self._place.stage}-{self._place.group}"

    def _meet(self, name: str, ranks: Sequence[int], slot_bytes: int) -> RankExchange:
        setup, size, number = self._setup, len(ranks), ranks.index(self._setup.rank)
        if not setup.peers.share_memory(ranks) or not available_builds():
            return GlooExchange(self._group(name, number, size), slot_bytes)
        # All ranks of the host may compute at once.
        num_here = len(setup.peers.neighbours) or self._layout.num_ranks
        has_processors = setup.threads * num_here <= usable_cores()
        with self._in_room():
            return SharedMemoryExchange(
                self._folder,
                name,
                size=size,
                rank=number,
                slot_bytes=slot_bytes,
                spin_us=SPIN_US if setup.threads and has_processors else SHARED_SPIN_US,
            )

    def kv_group(self, model: ModelSpec) -> KVGroup | None:
        """Its KV group, once the ranks of its place in all the others are there; None if there is one group.

        model: the part that this rank has.
        """
        if self._layout.groups == 1:
            return None
        place, num_groups = self._place, self._layout.groups
        slot_bytes = group_slot_bytes(self._setup.max_num_batched_tokens, num_groups, model)
        name = f"groups-{place.stage}-{place.tensor}"
        peers = [self._layout.rank_at(place._replace(group=number)) for number in range(num_groups)]
        return KVGroup(self._setup, self._meet(name, peers, slot_bytes))

    def stage(self, hidden_size: int, dtype: torch.dtype) -> Stage:
        """Between its stage and those before and after it. dtype: of the residual stream."""
        place, last = self._place, self._layout.stages - 1
        before: HandOverReceiver | None = None
        after: HandOverSender | None = None
        if place.stage > 0:
            before = self._receiver(place, hidden_size, dtype)
        if place.stage < last:
            after = self._sender(place._replace(stage=place.stage + 1), hidden_size, dtype)
        return Stage(hidden_size, dtype, before, after)

    def _receiver(self, end: Place, hidden_size: int, dtype: torch.dtype) -> HandOverReceiver:
        name, stage = self._name(end), end.stage - 1
        if self._setup.peers.share_memory([self._layout.rank_at(end._replace(stage=stage)), self._setup.rank]):
            with self._in_room():
                return SharedReceiver(self._folder, name, **self._ring(hidden_size, dtype), stage=stage)
        return GlooReceiver(self._group(name, 1, 2), hidden_size, dtype, stage=stage)

    def _sender(self, end: Place, hidden_size: int, dtype: torch.dtype) -> HandOverSender:
        name = self._name(end)
        if self._setup.peers.share_memory([self._setup.rank, self._layout.rank_at(end)]):
            return SharedSender(self._folder, name, **self._ring(hidden_size, dtype))
        return GlooSender(self._group(name, 0, 2), self._num_slots)

    def _ring(self, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "num_slots": self._num_slots,
            "max_tokens": self._setup.max_num_batched_tokens,
            "hidden_size": hidden_size,
            "dtype": dtype,
        }

    @contextlib.contextmanager
    def _in_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UsageError(
                f"{self._folder.parent} has no room for what ranks exchange in a step of "
                f"{self._setup.max_num_batched_tokens} tokens; make it larger, as with --shm-size of a container, or "
                "lower --max-num-batched-tokens"
            ) from error

    @property
    def _num_slots(self) -> int:
        """As many as steps can be in flight."""
        return self._layout.stages + 1

    @property
    def _folder(self) -> Path:
        return Path(self._setup.peers.shared_memory)

    def _name(self, place: Place) -> str:
        """Of the link that ends at this place."""
        return f"stage-{place.stage}-{place.group}-{place.tensor}"

    def _group(self, name: str, number: int, size: int) -> Any:
        return self._whole_store().group(name, number, size)

    def _whole_store(self) -> GlooStore:
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _open_store(self) -> GlooStore:
        return GlooStore(self._setup.peers, self._setup.rank, self._layout.num_ranks)
