"""The configuration: one tree of structs, the only source of every default, TOML key and command-line flag.

TOML sections are the fields of `Config`; a flag is the field's name in kebab case, so no name occurs in two
sections. Descriptions are the help text. `Meta.extra` says what a type cannot: `secret` (never shown nor
recorded), `plugin` (the kind of plug-in that a spec names), `allowed` (a pattern in words), `metavar` (what
help calls the value), `number` (a string that may be given as a number).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from eventlm.config.classes import ServiceClass
from eventlm.config.core import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_NAME_LENGTH,
    MAX_NUMBER,
    MAX_REPLICAS,
    MAX_STEPS_IN_FLIGHT,
)
from eventlm.config.gpu import GpuConfig
from eventlm.config.server import ServerConfig
from eventlm.config.sizes import PATTERN as SIZE_PATTERN

#: A plug-in and its parameters: `{"type": "edf", "multiplier": 2}`, on the command line `edf:multiplier=2`.
PluginSpec = dict[str, Any]

#: The value of an option that is resolved where it is used.
AUTO = "auto"

#: Far above it the libraries that compute die instead of refusing.
MAX_THREADS = 1024

#: The default for the most tokens in one step: enough to keep a processor, and a GPU, busy.
BATCHED_TOKENS = 512
BATCHED_TOKENS_ON_GPU = 8192


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model."""

    model: Annotated[
        str,
        Meta(
            extra={"metavar": "MODEL"},
            description="checkpoint folder, Hugging Face repository ORG/NAME, smollm2 (the default model) or fake "
            "(hash tokens, no weights)",
        ),
    ] = "smollm2"
    revision: Annotated[
        str,
        Meta(
            extra={"metavar": "REVISION"},
            description="branch, tag or commit of a Hugging Face repository; empty: its main branch",
        ),
    ] = ""
    served_model_name: Annotated[
        str,
        Meta(
            max_length=MAX_NAME_LENGTH,
            extra={"metavar": "NAME", "allowed": f"a string of at most {MAX_NAME_LENGTH} characters"},
            description="name that requests use; empty: the folder's name, ORG/NAME or `smollm2`",
        ),
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(
            extra={"aliases": {"half": "float16", "float": "float32"}},
            description="type to compute in, of the weights and, unless kv_cache_dtype says otherwise, of the KV "
            "cache; auto: the checkpoint's own; half and float are float16 and float32",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8"],
        Meta(
            description="int8, on CPUs: weights are rounded to 8 bits when they are loaded, with a scale for each "
            "output, and activations during a step, with a scale for each token (W8A8); everything else "
            "is bfloat16"
        ),
    ] = "none"
    max_model_len: Annotated[
        int, Meta(ge=0, le=MAX_NUMBER, description="longest context (prompt and output) in tokens; 0: the model's own")
    ] = 0
    fake: Annotated[
        dict[str, Any],
        Meta(
            extra={"metavar": "KEY=VALUE,..."},
            description="parameters of `--model fake`: nanoseconds of a step (base_ns, prefill_token_ns, decode_ns, "
            "context_token_ns), chances in parts per million (end_ppm, late_ppm, die_ppm, poison_ppm, piece_ppm, "
            "nan_ppm), and late_factor",
        ),
    ] = {}


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE, description="tokens in one KV block")] = 16
    num_blocks: Annotated[
        int, Meta(ge=0, le=MAX_BLOCKS, description="KV blocks of each replica; 0: as many as kv_memory holds")
    ] = 0
    kv_memory: Annotated[
        str,
        Meta(
            pattern=rf"^(auto|{SIZE_PATTERN})$",
            extra={"metavar": "SIZE", "allowed": "auto, or a size such as 512MiB or 2GiB"},
            description="memory for the KV blocks of each replica, such as 2GiB; auto: a quarter of what the weights "
            "leave free, at most 4GiB; on a GPU what they leave of gpu_memory_utilization",
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8", "fp8"],
        Meta(
            extra={"aliases": {"fp8_e4m3": "fp8"}},
            description="type of keys and values; auto: the model's own; fp8 (e4m3) and, on CPUs, int8 take half of "
            "bfloat16's memory, with a scale for each token and head",
        ),
    ] = "auto"
    prefix_cache: Annotated[
        bool, Meta(description="reuse KV blocks that an earlier request with the same prefix has computed")
    ] = True
    isolate_prefix_cache: Annotated[
        Literal["none", "key"],
        Meta(description="key: a request reuses only KV blocks that requests with the same API key have computed"),
    ] = "none"


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduling: plug-ins and limits."""

    policy: Annotated[
        PluginSpec, Meta(extra={"plugin": "policy"}, description="who goes first, such as edf:multiplier=2")
    ] = field(default_factory=lambda: {"type": "fcfs"})
    extra_policy: Annotated[
        list[str],
        Meta(
            extra={"metavar": "SPEC"},
            description="a policy that can be swapped in at run time by its name (POST /admin/policy); may be repeated",
        ),
    ] = []
    batcher: Annotated[
        PluginSpec,
        Meta(
            extra={"plugin": "batcher"},
            description="how large prefill chunks are, such as dynamic:target_ms=50",
        ),
    ] = field(default_factory=lambda: {"type": "fixed"})
    router: Annotated[PluginSpec, Meta(extra={"plugin": "router"}, description="which replica gets a request")] = field(
        default_factory=lambda: {"type": "pull"}
    )
    replicas: Annotated[
        int, Meta(ge=1, le=MAX_REPLICAS, description="worker replicas, each with its own process and KV cache")
    ] = 1
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=MAX_NUMBER, description="most sequences that run on a replica at once")
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="most tokens in one step; 0: 512, or 8192 on a GPU, and no fewer than max_num_seqs",
        ),
    ] = 0
    max_queue_len: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="most sequences that wait; a request beyond it gets a 429. A request for several, such as a "
            "list of prompts, is admitted as a whole or not at all",
        ),
    ] = 2048
    max_steps_in_flight: Annotated[
        int,
        Meta(ge=1, le=MAX_STEPS_IN_FLIGHT, description="most steps that are shipped to a replica and not completed"),
    ] = 2
    max_decodes_in_flight_per_seq: Annotated[
        int, Meta(ge=1, le=MAX_STEPS_IN_FLIGHT, description="of those, most steps that decode the same sequence")
    ] = 2
    run_ahead_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="after a step that is predicted to take this long, the next one is planned only when it "
            "ends, so that requests that arrive meanwhile can be part of it; 0: always plan ahead",
        ),
    ] = 100
    max_skips: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="times that a sequence that does not fit is passed over before it blocks the queue",
        ),
    ] = 8
    max_evictions: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="times a sequence can be evicted for a more urgent one between two of its tokens",
        ),
    ] = 2
    predictor: Annotated[
        list[int],
        Meta(
            extra={"metavar": "N,..."},
            description="coefficients of the step-time model in ps; empty: from the cache, or measured in a warm-up",
        ),
    ] = []
    predictor_cache: Annotated[
        bool,
        Meta(description="keep what a warm-up has measured, so that the next start needs none; no: measure again"),
    ] = True

    def batched_tokens(self, *, on_gpu: bool = False) -> int:
        """Most tokens in one step, as given or as the device suggests."""
        usual = BATCHED_TOKENS_ON_GPU if on_gpu else BATCHED_TOKENS
        return self.max_num_batched_tokens or max(usual, self.max_num_seqs)


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker processes."""

    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_THREADS,
            description="compute threads of a worker; 0: the cores divided by the replicas, less one core for the "
            "engine if there are more than four",
        ),
    ] = 0
    pin_threads: Annotated[
        bool,
        Meta(
            description="keep each compute thread of the compiled forward pass, except a worker's first, on a "
            "processor of its own, if there are enough for all workers"
        ),
    ] = False
    cpu_kernels: Annotated[
        Literal["auto", "amx", "avx512", "avx2", "baseline", "torch"],
        Meta(
            description="build of the forward pass for models in bfloat16; auto: the fastest that was compiled and "
            "that this processor can run, else torch"
        ),
    ] = "auto"
    heartbeat_timeout_seconds: Annotated[
        int,
        Meta(
            ge=1, le=MAX_NUMBER, description="silence after which a worker or a front end counts as lost and is killed"
        ),
    ] = 20
    step_timeout_seconds: Annotated[
        int, Meta(ge=1, le=MAX_NUMBER, description="longest step before a worker counts as hung")
    ] = 600
    start_timeout_seconds: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_NUMBER,
            description="how long a worker that starts may show no progress before it counts as hung",
        ),
    ] = 600
    profile_ops: Annotated[
        bool,
        Meta(description="measure each operation of every step in the worker; `eventlm trace stats` sums them up"),
    ] = False
    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="restarts in a row without a completed step before the engine gives a replica up",
        ),
    ] = 5
    max_losses: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_NUMBER,
            description="workers lost in a row while they compute one request alone before it ends with an error; "
            "fewer suffice where workers are seldom lost otherwise; at most --max-restarts; 0: it never does",
        ),
    ] = 5


class RecordConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recording."""

    record: Annotated[
        str,
        Meta(
            extra={"metavar": "DIR", "off": "no trace"},
            description="folder for traces: DIR/<run>/trace.jsonl, DIR/latest; auto: the user's state folder for a "
            "server, none for other commands; empty: no trace",
        ),
    ] = AUTO
    record_tokens: Annotated[
        bool,
        Meta(
            description="also write the token ids of prompts and outputs, to tokens.jsonl beside the trace; `eventlm "
            "replay --execute` needs them; anyone who can read that file can recover the texts"
        ),
    ] = False
    record_segment: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"},
            description="length of a trace's files; each but the first begins with a snapshot, so that it can be "
            "read alone",
        ),
    ] = "256MiB"
    record_keep: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"},
            description="how much of a run is kept, in the state folder of all runs together; the oldest files are "
            "removed first",
        ),
    ] = "1GiB"
    record_lag: Annotated[
        Literal["wait", "gap"],
        Meta(
            description="what happens if the disk is slow; wait: the engine waits for it; gap: it goes on, and what "
            "takes too long is not recorded"
        ),
    ] = "wait"
    record_lag_ms: Annotated[
        int, Meta(ge=10, description="with record_lag gap: how long a write may take before events are given up")
    ] = 1000
    record_lag_memory: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"},
            description="with record_lag gap: how much may wait for a write before it is given up",
        ),
    ] = "64MiB"
    checkpoint_events: Annotated[int, Meta(ge=1, description="events between two digests of the state")] = 1000
    validate_every: Annotated[
        int, Meta(ge=0, description="drains between two checks of the core's invariants; 0: never")
    ] = 1024

    @property
    def folder(self) -> str:
        """The folder to record to; empty where nobody has asked for a trace."""
        return "" if self.record == AUTO else self.record


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, on standard error."""

    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        Meta(description="lowest level that is logged; auto: info for a server, warning for other commands"),
    ] = "auto"
    log_format: Annotated[
        Literal["auto", "text", "json"],
        Meta(description="text for people or JSON lines for programs; auto: text on a terminal only"),
    ] = "auto"
    log_stats_interval_s: Annotated[
        int,
        Meta(
            ge=0,
            description="seconds of work between two lines with the load, the throughput and the use of the cache; 0: "
            "no such lines",
        ),
    ] = 10


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of an engine and its server. `classes` by name."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    worker: WorkerConfig = WorkerConfig()
    gpu: GpuConfig = GpuConfig()
    record: RecordConfig = RecordConfig()
    log: LogConfig = LogConfig()
    classes: dict[str, ServiceClass] = {}
