"""The limits of the core: part of a trace's header, and of what every option of them may say.

A header may come from anywhere, so it is checked by the same limits as an engine's start: no run can be recorded that
would be refused when it is read, and no forged one takes more memory than a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType

#: Of all replicasets together.
MAX_REPLICAS = 1024
#: Tokens in one KV block.
MAX_BLOCK_SIZE = 512
#: KV blocks of all replicas together. A core keeps some 60 bytes for each, 1 GiB in all, and every reader of a
#: trace builds one; each is in the snapshots of a trace too, of which every one is a line.
MAX_BLOCKS = 1 << 24
#: State slots of all replicas together. A core keeps some 200 bytes for each.
MAX_STATE_SLOTS = 1 << 20
MAX_STEPS_IN_FLIGHT = 16
#: Tensor ranks of one KV group, stages of a pipeline, and KV groups.
MAX_RANKS = 64
MAX_STAGES = 15
MAX_KV_GROUPS = 64
#: All of those together.
MAX_RANKS_OF_REPLICA = 1024
#: Characters of a model's name.
MAX_NAME_LENGTH = 1024
#: What any number of a header can be: it has 64 bits.
MAX_NUMBER = (1 << 63) - 1

Count = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
StepsInFlight = Annotated[int, Meta(ge=1, le=MAX_STEPS_IN_FLIGHT)]
ModelName = Annotated[str, Meta(max_length=MAX_NAME_LENGTH)]


def most_blocks(num_pools: int) -> int:
    """How many KV blocks each of so many replicas, or KV groups of them, can have."""
    return MAX_BLOCKS // num_pools


def check_together(configs: Sequence[CoreConfig]) -> None:
    """Raises ValueError if all replicasets of an engine have more replicas, blocks or state slots than it can have."""
    num_replicas = sum(config.num_replicas for config in configs)
    if num_replicas > MAX_REPLICAS:
        raise ValueError(
            f"{len(configs)} replicasets of {num_replicas:,} replicas: an engine has up to {MAX_REPLICAS:,}"
        )
    num_blocks = sum(config.num_replicas * config.blocks_per_replica for config in configs)
    if num_blocks > MAX_BLOCKS:
        raise ValueError(
            f"{len(configs)} replicasets of {num_blocks:,} blocks are more than the {MAX_BLOCKS:,} blocks that all "
            "replicas can have together"
        )
    num_slots = sum(config.num_replicas * config.state_slots for config in configs if config.state_slots is not UNSET)
    if num_slots > MAX_STATE_SLOTS:
        raise ValueError(
            f"{len(configs)} replicasets of {num_slots:,} state slots are more than the {MAX_STATE_SLOTS:,} that all "
            "replicas can have together"
        )


class Forwarding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are sent to replicas that are other servers.

    backoff_ns: shortest wait before the second attempt, doubled with each further one. retry_share_ppm: retries and
    hedges that all requests together earn, in millionths of a request; ten are given. hedge_ns: how near its deadline
    a request without a token gets a second attempt elsewhere; 0: none does. first_limit: how many requests at once a
    backend gets at first whose limit is not known.
    """

    max_attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    backoff_ns: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] = 250_000_000
    retry_share_ppm: Annotated[int, Meta(ge=0, le=100_000_000)] = 200_000
    hedge_ns: Count = 0
    first_limit: PositiveCount = 8


class CoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The machine and its limits as the core has them. Part of the header: it and the facts make a run.

    Lengths are in tokens. `max_model_len` has been cut to (num_blocks - 1) x block_size before it gets here.
    Raises ValueError for more blocks than all replicas together can have; the other limits are checked by what decodes
    or converts it.
    """

    models: Annotated[list[ModelName], Meta(min_length=1)]
    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE)] = 16
    #: One is never given away.
    num_blocks: Annotated[int, Meta(ge=2, le=MAX_BLOCKS)]
    max_model_len: PositiveCount
    num_replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] = 1
    #: Of one step. A pipeline has several under way, and as many times the residents; see `max_residents`.
    max_num_seqs: PositiveCount = 256
    max_num_batched_tokens: PositiveCount = 2048
    #: Sequences that may wait; online groups that would not fit are rejected.
    max_queue_len: Count = 2048
    #: What a replica of one stage may have, here and in the next line; see `steps_in_flight`.
    max_steps_in_flight: StepsInFlight = 2
    max_decodes_in_flight_per_seq: StepsInFlight = 2
    #: No step is planned after one that is predicted to take this long, once every stage has a step; 0: no limit.
    run_ahead_ms: Count = 0
    #: Most tokens that one row may produce in one step; above 1 for speculation.
    max_tokens_per_row: PositiveCount = 1
    #: Batch sizes, ascending, for which workers have captured a decode step as a graph; larger steps run without one,
    #: as they do in a what-if that raises max_num_seqs. Empty: none.
    graph_buckets: list[PositiveCount] = []
    #: How often a sequence may be passed over by less urgent ones that fit before it blocks the line.
    max_skips: Count = 8
    #: Evictions at admission that a sequence can suffer between two of its tokens.
    max_evictions: Count = 2
    #: Workers lost in a row while they computed a sequence, with no step completed in between, until it ends with an
    #: error; 0: none ever does.
    max_losses: Count = 0
    #: Slots of each replica for the states of recurrent layers: one for every resident, and copies that later prompts
    #: start from. Not set: the model has no recurrent layers, and its header is as it was before there were any.
    state_slots: Annotated[int, Meta(ge=1, le=MAX_STATE_SLOTS)] | UnsetType = UNSET
    #: A copy is kept every so many tokens of a sequence, a multiple of the block size; not set: only where prompts end.
    state_interval: PositiveCount | UnsetType = UNSET
    #: Stages of each replica, each of which computes some of the layers. Not set, here and below: there is one, and the
    #: header is as it was before there could be more.
    num_stages: Annotated[int, Meta(ge=2, le=MAX_STAGES)] | UnsetType = UNSET
    #: Parts that decodes are divided into, so that every stage has a step; not set: as many as there are stages.
    micro_batches: Annotated[int, Meta(ge=1, le=MAX_STAGES + 1)] | UnsetType = UNSET
    #: KV groups of each replica. Each has a pool of `num_blocks` blocks.
    num_kv_groups: Annotated[int, Meta(ge=2, le=MAX_KV_GROUPS)] | UnsetType = UNSET
    #: Tokens of a sequence that lie in one group before the next one goes on; set with the groups.
    kv_shard_tokens: PositiveCount | UnsetType = UNSET
    #: The replicas are other servers, with at most `max_num_seqs` requests at once each. `num_blocks` stand for the
    #: prefix cache of each.
    forwards: Forwarding | UnsetType = UNSET

    @cached_property
    def stages(self) -> int:
        """Stages of each replica."""
        return self.num_stages or 1

    @cached_property
    def groups(self) -> int:
        """KV groups of each replica."""
        return self.num_kv_groups or 1

    @cached_property
    def blocks_per_replica(self) -> int:
        """KV blocks of all groups of a replica."""
        return self.num_blocks * self.groups

    @cached_property
    def decode_batches(self) -> int:
        """Parts that the decoding sequences of a replica are divided into."""
        return self.micro_batches or self.stages

    @cached_property
    def max_residents(self) -> int:
        """Most sequences that hold blocks and a slot on a replica."""
        return self.max_num_seqs * self.decode_batches

    @cached_property
    def steps_in_flight(self) -> int:
        """Most steps of a replica that are launched and not completed. A pipeline has one for each stage, so that none
        stands idle, and one that waits; there is room for no more between the stages.
        """
        return self.max_steps_in_flight if self.stages == 1 else self.stages + 1

    @cached_property
    def decodes_in_flight_per_seq(self) -> int:
        """Most of them that decode the same sequence. In a pipeline the first stage needs the token that the last one
        draws.
        """
        return self.max_decodes_in_flight_per_seq if self.stages == 1 else 1

    def __post_init__(self) -> None:
        if self.num_replicas * self.blocks_per_replica > MAX_BLOCKS:
            what = f"{self.num_replicas} replicas of {self.num_blocks:,} blocks"
            if self.groups > 1:
                what += f" in each of {self.groups} KV groups"
            raise ValueError(f"{what} are more than the {MAX_BLOCKS:,} blocks that all replicas can have together")
        if self.state_slots is not UNSET:
            self._check_states(self.state_slots)
        self._check_layout()

    def _check_layout(self) -> None:
        if (self.num_kv_groups is UNSET) != (self.kv_shard_tokens is UNSET):
            raise ValueError("num_kv_groups and kv_shard_tokens are set together or not at all")
        if self.kv_shard_tokens is not UNSET and self.kv_shard_tokens % self.block_size:
            raise ValueError(
                f"kv_shard_tokens {self.kv_shard_tokens} is not a multiple of block_size {self.block_size}: a block "
                "lies in one group"
            )
        if self.groups > 1 and self.max_tokens_per_row != 1:
            raise ValueError(f"max_tokens_per_row {self.max_tokens_per_row}: with num_kv_groups it must be 1")
        if self.groups > 1 and self.state_slots is not UNSET:
            raise ValueError("a recurrent state lies in one place: with state_slots there is one KV group")
        if self.micro_batches is not UNSET and self.stages == 1:
            raise ValueError("micro_batches are of a pipeline: they need num_stages")
        if self.decode_batches > self.stages + 1:
            raise ValueError(
                f"micro_batches {self.micro_batches} are more than the {self.stages + 1} steps that {self.stages} "
                "stages have in flight: some sequences would never run"
            )

    def _check_states(self, state_slots: int) -> None:
        if self.num_replicas * state_slots > MAX_STATE_SLOTS:
            raise ValueError(
                f"{self.num_replicas} replicas of {state_slots:,} state slots are more than the {MAX_STATE_SLOTS:,} "
                "that all replicas can have together"
            )
        if state_slots <= self.max_residents:
            batches = f" in each of {self.decode_batches} micro-batches" if self.decode_batches > 1 else ""
            raise ValueError(
                f"state_slots {state_slots} is not more than max_num_seqs {self.max_num_seqs}{batches}: every sequence "
                "that runs has one, and one more is for copies"
            )
        if self.max_tokens_per_row != 1:
            raise ValueError(
                f"max_tokens_per_row {self.max_tokens_per_row}: a recurrent state cannot go back by a token, so with "
                "state_slots it must be 1"
            )
        if self.state_interval is not UNSET and self.state_interval % self.block_size:
            raise ValueError(f"state_interval {self.state_interval} is not a multiple of block_size {self.block_size}")
        if self.max_num_batched_tokens < self.block_size:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than block_size {self.block_size}: with "
                "state_slots a step must have room for a whole block"
            )
