"""The configuration: one tree of structs, the only source of every default, TOML key and command-line flag.

TOML sections are the fields of `Config`; a flag is the field's name in kebab case, so no name occurs in two sections.
The string in a field's annotation is its help text. `Meta.extra` holds fields of `options.Option` that a type cannot
express, such as `hide`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from eventlm.config.core import (
    MAX_BLOCK_SIZE,
    MAX_BLOCKS,
    MAX_KV_GROUPS,
    MAX_NAME_LENGTH,
    MAX_NUMBER,
    MAX_RANKS,
    MAX_REPLICAS,
    MAX_STAGES,
    MAX_STATE_SLOTS,
    MAX_STEPS_IN_FLIGHT,
    Count,
    PositiveCount,
    StepsInFlight,
)
from eventlm.config.model_rules import ModelRules
from eventlm.config.secrets import hide, hide_keys_of
from eventlm.sampling_params import Pooling
from eventlm.types import ModelImpl, parts_per_million

#: A plug-in and its parameters: `{"type": "edf", "multiplier": 2}`, on the command line `edf:multiplier=2`.
PluginSpec = dict[str, Any]

#: The value of an option that is resolved where it is used.
AUTO = "auto"

#: Far above it the libraries that compute die instead of refusing.
MAX_THREADS = 1024

#: The default for the most tokens in one step: enough to keep a processor, and a GPU, busy.
BATCHED_TOKENS = 512
BATCHED_TOKENS_ON_GPU = 8192

#: What a size looks like.
SIZE_PATTERN = r"[0-9]+(\.[0-9]+)?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)"

_SIZE_UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
}
_SIZE = re.compile(r"([0-9.]+)([A-Za-z]+)")

#: The class of requests that name none, if there is one of this name.
DEFAULT_CLASS = "default"
#: In OpenAI's `service_tier` it leaves the choice to the server.
AUTO_CLASS = "auto"
CLASS_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="lower goes first")]
_Milliseconds = Annotated[int, Meta(ge=0, le=1_000_000_000)]

_SECOND_NS = 1_000_000_000
#: Metrics of front ends come with their heartbeats.
_MAX_HEARTBEAT_NS = 30 * _SECOND_NS

_File = Annotated[str, Meta(extra={"metavar": "FILE"})]
_Size = Annotated[
    str,
    Meta(pattern=rf"^{SIZE_PATTERN}$", extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"}),
]


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model."""

    model: Annotated[
        str,
        Meta(extra={"metavar": "MODEL"}),
        "checkpoint folder, GGUF file, Hugging Face repository ORG/NAME, a GGUF file of one (ORG/NAME:Q4_K_M), "
        "smollm2 (the default model; smollm2:bf16 is the same in bfloat16) or fake (hash "
        "tokens, no weights)",
    ] = "smollm2"
    revision: Annotated[
        str,
        Meta(extra={"metavar": "REVISION"}),
        "branch, tag or commit of a Hugging Face repository; empty: its main branch",
    ] = ""
    served_model_name: Annotated[
        str,
        Meta(
            max_length=MAX_NAME_LENGTH,
            extra={"metavar": "NAME", "allowed": f"a string of at most {MAX_NAME_LENGTH} characters"},
        ),
        "name that requests use; empty: the folder's or file's name, ORG/NAME or `smollm2`",
    ] = ""
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        Meta(extra={"aliases": {"half": "float16", "float": "float32"}}),
        "type to compute in, of the weights and, unless kv_cache_dtype says otherwise, of the KV cache; auto: the "
        "checkpoint's own; half and float are float16 and float32",
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4"],
        "int8, on CPUs: weights are rounded to 8 bits when they are loaded, with a scale for each output, and "
        "activations during a step, with a scale for each token (W8A8); int4, in the compiled forward pass: to 4 bits, "
        "with a scale and a minimum for 32 inputs, those of keys, values, embedding and output matrix to 8 bits, and "
        "activations to 8 bits with a scale for 32 inputs (with AMX only in steps of fewer than some 32 tokens); "
        "everything else is bfloat16",
    ] = "none"
    model_impl: Annotated[
        ModelImpl,
        "who computes the model: eventlm, or, on CPUs, transformers, at half the speed or less; auto: transformers if "
        "eventlm does not know the architecture",
    ] = "auto"
    max_model_len: Annotated[Count, "longest context (prompt and output) in tokens; 0: the model's own"] = 0
    fake: Annotated[
        dict[str, Any],
        Meta(extra={"metavar": "KEY=VALUE,..."}),
        "parameters of `--model fake`: nanoseconds of a step (base_ns, prefill_token_ns, decode_ns, "
        "context_token_ns), chances in parts per million (end_ppm, late_ppm, die_ppm, raise_ppm, hang_ppm, "
        "poison_ppm, piece_ppm, nan_ppm), late_factor, and recurrent=true for a model with recurrent layers",
    ] = {}


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache."""

    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE), "tokens in one KV block"] = 16
    num_blocks: Annotated[
        int, Meta(ge=0, le=MAX_BLOCKS), "KV blocks of each replica; 0: as many as kv_memory holds"
    ] = 0
    kv_memory: Annotated[
        str,
        Meta(
            pattern=rf"^(auto|{SIZE_PATTERN})$",
            extra={"metavar": "SIZE", "allowed": "auto, or a size such as 512MiB or 2GiB"},
        ),
        "memory for the KV blocks of each replica, such as 2GiB; auto: a quarter of what weights and activations leave "
        "free, at most 4GiB, rotary tables included; on a GPU what they leave of gpu_memory_utilization",
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "int8", "fp8"],
        Meta(extra={"aliases": {"fp8_e4m3": "fp8"}}),
        "type of keys and values; auto: the model's own; fp8 (e4m3) and, on CPUs, int8 take half of bfloat16's "
        "memory, with a scale for each token and head",
    ] = "auto"
    state_slots: Annotated[
        int,
        Meta(ge=0, le=MAX_STATE_SLOTS),
        "of a model with recurrent layers: slots of each replica for their states, one for every running sequence and "
        "the rest for copies that later prompts start from; 0: two for every sequence, as far as half of the cache's "
        "memory holds them",
    ] = 0
    # Of today's hybrids a state takes about as much memory as the keys and values of this many tokens.
    state_interval: Annotated[
        int,
        Meta(ge=0, le=MAX_NUMBER),
        "of a model with recurrent layers: tokens between two copies of a sequence's state, rounded up to whole "
        "blocks; a prompt starts from the last copy in the prefix that it shares; 0: copies only where prompts end or "
        "part",
    ] = 1024
    prefix_cache: Annotated[bool, "reuse KV blocks that an earlier request with the same prefix has computed"] = True
    isolate_prefix_cache: Annotated[
        Literal["none", "key"],
        "key: a request reuses only KV blocks that requests with the same API key have computed",
    ] = "none"


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Scheduling: plug-ins and limits."""

    policy: Annotated[
        PluginSpec, Meta(extra={"plugin_kind": "policy"}), "which sequence goes first, such as edf:multiplier=2"
    ] = field(default_factory=lambda: {"type": "fcfs"})
    extra_policy: Annotated[
        list[str],
        Meta(extra={"metavar": "SPEC"}),
        "a policy that can be swapped in at run time by its name (POST /admin/policy); may be repeated",
    ] = []
    batcher: Annotated[
        PluginSpec, Meta(extra={"plugin_kind": "batcher"}), "how large prefill chunks are, such as dynamic:target_ms=50"
    ] = field(default_factory=lambda: {"type": "fixed"})
    router: Annotated[PluginSpec, Meta(extra={"plugin_kind": "router"}), "which replica gets a request"] = field(
        default_factory=lambda: {"type": "pull"}
    )
    replicas: Annotated[int, Meta(ge=1, le=MAX_REPLICAS), "worker replicas, each with its own process and KV cache"] = 1
    max_num_seqs: Annotated[
        PositiveCount,
        "most sequences in one step; a replica runs that many at once, in a pipeline that many per micro-batch",
    ] = 256
    max_num_batched_tokens: Annotated[
        Count, "most tokens in one step; 0: 512, or 8192 on a GPU, and no fewer than max_num_seqs"
    ] = 0
    max_queue_len: Annotated[
        Count,
        "most sequences that wait; a request beyond it gets a 429. A request for several, such as a list of prompts, "
        "is admitted as a whole or not at all",
    ] = 2048
    max_steps_in_flight: Annotated[
        StepsInFlight,
        "most steps that are shipped to a replica and not completed; in a pipeline always one for each stage and one "
        "more",
    ] = 2
    max_decodes_in_flight_per_seq: Annotated[
        int,
        Meta(ge=0, le=MAX_STEPS_IN_FLIGHT),
        "of those, most steps that decode the same sequence; 0: 2, in a pipeline 1, which is all that it can have",
    ] = 0
    run_ahead_ms: Annotated[
        Count,
        "after a step that is predicted to take this long, the next one is planned only when it ends, so that "
        "requests that arrive meanwhile can be part of it; in a pipeline only once every stage has a step; 0: always "
        "plan ahead",
    ] = 100
    max_skips: Annotated[Count, "times that a sequence that does not fit is passed over before it blocks the queue"] = 8
    max_evictions: Annotated[
        Count, "times a sequence can be evicted for a more urgent one between two of its tokens"
    ] = 2
    predictor: Annotated[
        list[int],
        Meta(extra={"metavar": "N,..."}),
        "coefficients of the step-time model in ps; empty: from the cache, or measured in a warm-up",
    ] = []
    predictor_cache: Annotated[
        bool, "keep what a warm-up has measured, so that the next start needs none; false: measure again"
    ] = True

    def batched_tokens(self, *, on_gpu: bool = False) -> int:
        """Most tokens in one step, as given or as the device suggests."""
        usual = BATCHED_TOKENS_ON_GPU if on_gpu else BATCHED_TOKENS
        return self.max_num_batched_tokens or max(usual, self.max_num_seqs)


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server."""

    host: Annotated[
        str, Meta(extra={"metavar": "ADDRESS"}), "address to bind; anything but loopback exposes the server"
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), "port to bind; 0 takes a free one"] = 8000
    api_key: Annotated[
        str,
        Meta(extra={"metavar": "KEY", "hide": hide}),
        "key that clients must send as a bearer token; better set EVENTLM_API_KEY",
    ] = ""
    api_keys_file: Annotated[
        _File,
        "TOML file of API keys, a table [[keys]] for each: name, key or its sha256, scopes (inference, admin), "
        "service_class, limits; read again when it changes",
    ] = ""
    requests_choose_class: Annotated[
        Literal["auto", "always", "never"],
        "whether requests may choose any service class, and a better priority than that of their class; auto: unless "
        "a key has a class",
    ] = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1024), "largest request body"] = 16 * 1024 * 1024
    body_memory: Annotated[
        _Size,
        "memory for the bodies of all running requests, in each process that serves HTTP; beyond it a request gets a "
        "503",
    ] = "1GiB"
    pooling: Annotated[
        Pooling, "default pooling of embeddings: the hidden state of the last token, or the mean of all tokens"
    ] = "last"
    api_servers: Annotated[
        int,
        Meta(ge=0, le=64),
        "processes for HTTP, templates and tokenizing beside the engine's; 0: the engine's own process does it",
    ] = 0
    max_connections: Annotated[
        int,
        Meta(ge=1),
        "most connections at once, shared equally among --api-servers; one more gets a 503 and is closed, or with TLS "
        "is closed before its handshake",
    ] = 4096
    header_timeout_seconds: Annotated[
        int, Meta(ge=1), "how long a client may take for the TLS handshake and for the head of a request"
    ] = 20
    body_timeout_seconds: Annotated[int, Meta(ge=1), "how long a client may take for a request's body"] = 60
    idle_timeout_seconds: Annotated[
        int, Meta(ge=1), "how long a connection may idle between requests before it is closed"
    ] = 75
    tls_cert: Annotated[
        _File,
        "certificate chain in PEM; with --tls-key the server speaks HTTPS, TLS 1.2 or newer. SIGHUP reads both again",
    ] = ""
    tls_key: Annotated[_File, "the certificate's private key in PEM"] = ""
    cors_origin: Annotated[
        list[str],
        Meta(extra={"metavar": "ORIGIN"}),
        "origin of a web page that may use the server from browsers, such as https://chat.example.com; * for all; may "
        "be repeated",
    ] = []
    ui: Annotated[bool, "serve the chat page at / and the dashboard at /dashboard"] = True
    allowed_host: Annotated[
        list[str],
        Meta(extra={"metavar": "NAME"}),
        "host name by which a server without keys on a loopback address may be called, beside localhost and IP "
        "addresses, such as that of a proxy before it; may be repeated",
    ] = []
    drain_seconds: Annotated[int, Meta(ge=0), "how long requests may run after SIGTERM before they are cancelled"] = 30
    resume_seconds: Annotated[
        int,
        Meta(ge=0, le=86_400),
        "how long a stream goes on after its client lost the connection, and can be resumed with GET /v1/stream/ID "
        "and Last-Event-ID; 0: it is cancelled at once",
    ] = 0
    resume_memory: Annotated[
        _Size, "memory for streams that can be resumed; beyond it the oldest can no longer be resumed"
    ] = "256MiB"
    response_store: Annotated[
        _File,
        "SQLite file, of mode 0600, in which responses and conversations with their prompts are kept over restarts; "
        "empty: in memory only",
    ] = ""
    response_seconds: Annotated[
        int, Meta(ge=1, le=315_360_000), "how long a response or a conversation is kept after its last change"
    ] = 86_400
    response_memory: Annotated[
        _Size,
        "bytes of all kept responses and conversations, in memory or in the file; beyond it the oldest of the key that "
        "has the most go",
    ] = "256MiB"
    max_responses: Annotated[
        int,
        Meta(ge=1, le=MAX_NUMBER),
        "most responses and conversations that are kept; beyond it the oldest of the key with the most go",
    ] = 10_000
    tokenizer_info: Annotated[
        bool, "serve the tokenizer's configuration and its chat template at GET /tokenizer_info, as vLLM does if asked"
    ] = False
    max_stream_buffer: Annotated[
        _Size,
        "bytes of a stream that may wait for a client that reads slowly; beyond it events are joined into fewer, "
        "larger chunks",
    ] = "64KiB"
    write_timeout_seconds: Annotated[
        int, Meta(ge=1), "time after which a client that reads nothing is disconnected"
    ] = 60
    batch_dir: Annotated[
        str,
        Meta(extra={"metavar": "DIR"}),
        "serve /v1/files and /v1/batches, and keep their files, prompts and outputs included, in this folder; no other "
        "server may use it; empty: do not serve them",
    ] = ""
    batch_window: Annotated[
        Count,
        "most sequences of batches that are under way at once, of which a quarter starts while there are other "
        "requests; more is faster for batches and slower for everybody else; 0: as many as run at once on all replicas",
    ] = 8
    batch_storage: Annotated[_Size, "bytes of all files of one key, results of batches included"] = "10GiB"
    batch_max_lines: Annotated[PositiveCount, "most lines of a batch"] = 50_000
    batch_max_objects: Annotated[PositiveCount, "most files per key, and most unfinished batches per key"] = 1000
    batch_keep_days: Annotated[
        int, Meta(ge=1, le=3650), "days to keep finished batches, and files whose upload does not set an expiry"
    ] = 30
    max_file_bytes: Annotated[int, Meta(ge=1024), "largest file that can be uploaded"] = 200 * 1024 * 1024
    tool_parser: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME", "allowed": "auto, none, hermes, llama3_json, an installed parser or module:Class"}
        ),
        "format of tool calls: hermes, llama3_json, another installed one or module:Class; auto takes what the chat "
        "template shows, none leaves calls in the text",
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME", "allowed": "auto, none, qwen3, deepseek_r1, an installed parser or module:Class"}
        ),
        "format of reasoning: qwen3, deepseek_r1, another installed one or module:Class; auto takes what the chat "
        "template shows, none leaves reasoning in the text",
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        "whether a request may bring its own chat template, which runs in a process of its own with limits of time and "
        "memory",
    ] = False


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Worker processes."""

    threads: Annotated[
        int,
        Meta(ge=0, le=MAX_THREADS),
        "compute threads of each worker process, that is of each rank; 0: the cores of the host divided by all ranks "
        "of its replicas, less one core for the engine if there are more than four",
    ] = 0
    pin_threads: Annotated[
        bool,
        "keep each compute thread of the compiled forward pass, except a worker's first, on a processor of its own, "
        "if there are enough for all workers",
    ] = False
    cpu_kernels: Annotated[
        Literal["auto", "amx", "avx512", "avx2", "baseline", "torch"],
        "build of the forward pass for models in bfloat16; auto: the fastest that was compiled and that this "
        "processor can run, else torch",
    ] = "auto"
    heartbeat_timeout_seconds: Annotated[
        PositiveCount, "silence after which a worker or a front end counts as lost and is killed"
    ] = 20
    step_timeout_seconds: Annotated[PositiveCount, "longest step before a worker counts as hung"] = 600
    start_timeout_seconds: Annotated[
        PositiveCount, "how long a worker that starts may show no progress before it counts as hung"
    ] = 600
    profile_ops: Annotated[
        bool, "measure each operation of every step in the worker; `eventlm trace stats` sums them up"
    ] = False
    max_restarts: Annotated[
        int, Meta(ge=0), "restarts in a row without a completed step before the engine gives a replica up"
    ] = 5
    max_losses: Annotated[
        Count,
        "workers lost in a row while they compute one request alone before it ends with an error; fewer are enough "
        "where workers are seldom lost otherwise; at most --max-restarts; 0: it never does",
    ] = 5

    @property
    def heartbeat_ns(self) -> int:
        """Time between heartbeats: a second, or up to half a minute where patience is long; at least four fit in a
        silence that counts as death.
        """
        patience_ns = min(self.heartbeat_timeout_seconds, self.step_timeout_seconds) * _SECOND_NS
        usual_ns = max(_SECOND_NS, min(patience_ns // 20, _MAX_HEARTBEAT_NS))
        return min(self.heartbeat_timeout_seconds * _SECOND_NS // 4, usual_ns)


class GpuConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Device, and what is for GPUs."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        "what computes the model; cuda: NVIDIA GPUs, each replica on the next one in CUDA_VISIBLE_DEVICES; auto: cuda "
        "if there are a GPU, its driver, a torch with CUDA and triton, else cpu",
    ] = "auto"
    attention_backend: Annotated[
        str,
        Meta(extra={"metavar": "NAME"}),
        "attention on a GPU: triton, flash_attn (which must be installed), torch_sdpa (slow, to compare with), or one "
        "that a package offers; auto: the first of these that can run the model",
    ] = "auto"
    gpu_memory_utilization: Annotated[
        str,
        Meta(
            pattern=r"^(0?\.[0-9]{0,5}[1-9]0*|1(\.0*)?)$",
            extra={"metavar": "SHARE", "allowed": "a share above 0 and up to 1, such as 0.9", "is_number": True},
        ),
        "share of a GPU's memory for weights, activations and KV cache of all replicas on it; the KV cache gets what "
        "a profiling run leaves, unless num_blocks or kv_memory is given",
    ] = "0.9"
    cuda_graphs: Annotated[
        bool,
        "capture steps that only decode as CUDA graphs, for several batch sizes, when a worker starts; a smaller step "
        "is padded to the next size",
    ] = True
    batch_invariant: Annotated[
        bool,
        "use GPU kernels whose results for a sequence do not depend on the rest of its batch: the same tokens under "
        "any load, somewhat slower",
    ] = False
    torch_compile: Annotated[
        bool,
        "compile the parts of the model around attention with torch.compile on a GPU, which makes the first start "
        "minutes slower; for models like Llama and Qwen3 whose weights are not packed",
    ] = False

    @property
    def memory_ppm(self) -> int:
        """`gpu_memory_utilization` in parts per million."""
        return parts_per_million(self.gpu_memory_utilization)


class ParallelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks: the processes of one replica."""

    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_RANKS),
        "ranks that share the heads, columns and vocabulary of each layer, 1 to 64; each reads and keeps its part of "
        "the weights",
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_STAGES),
        "stages that share the layers, 1 to 15; several steps are under way at once, each in another stage, up to 16 "
        "in all",
    ] = 1
    kv_parallel_size: Annotated[
        int,
        Meta(ge=1, le=MAX_KV_GROUPS),
        "groups of ranks that share the KV cache of long contexts, 1 to 64; each has all weights of its stage",
    ] = 1
    kv_shard_tokens: Annotated[
        PositiveCount,
        "tokens of a context that one KV group holds before the next one goes on, a multiple of block_size",
    ] = 8192
    micro_batches: Annotated[
        int,
        Meta(ge=0, le=MAX_STAGES + 1),
        "parts that the decoding sequences are divided into, so that every stage has a step; 0: as many as there are "
        "stages",
    ] = 0
    ranks_per_gpu: Annotated[
        int,
        Meta(ge=1, le=MAX_RANKS),
        "on GPUs: ranks of a replica that may share one, to try a layout out; nothing gets faster",
    ] = 1
    launcher: Annotated[
        PluginSpec,
        Meta(extra={"plugin_kind": "launcher"}),
        "what starts the ranks, and where: process, on this host; ray, on the nodes of a Ray cluster; an installed "
        "one or module:Class",
    ] = field(default_factory=lambda: {"type": "process"})

    @property
    def decode_batches(self) -> int:
        """Parts that the decoding sequences of a replica are divided into."""
        return self.micro_batches or self.pipeline_parallel_size


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Backends: other servers that run the model."""

    backend: Annotated[
        list[str],
        Meta(
            extra={
                "metavar": "SPEC",
                "allowed": "a list of URL[,KEY=VALUE,...], dns:HOST:PORT[,...] and file:PATH[,...]",
                "hide": hide_keys_of,
            }
        ),
        "a server that runs the model instead of own workers (vLLM, SGLang, llama.cpp, Ollama, eventlm or another "
        "with OpenAI's API), such as http://10.0.0.2:8000,max_concurrency=64; keys: key, key_env or key_file (API "
        "key), kind, model, max_concurrency, weight, ca_file, verify=false. dns:HOST:PORT: all addresses of a name; "
        "file:PATH: a file with a spec in each line, read again when it changes; may be repeated",
    ] = []
    tokenizer: Annotated[
        str,
        Meta(extra={"metavar": "MODEL"}),
        "folder or Hugging Face repository of the backends' tokenizer, for exact counts of prompts and for prefix "
        "routing; empty: both use pieces of four bytes",
    ] = ""
    max_backends: Annotated[
        int,
        Meta(ge=0, le=MAX_REPLICAS),
        "most backends at once, including those added while the server runs; 0: those at the start and 16 more",
    ] = 0
    backend_cache_tokens: Annotated[
        PositiveCount, "size of a backend's prefix cache, in tokens, if the backend does not report it"
    ] = 262_144
    forward_retries: Annotated[
        int, Meta(ge=0, le=100), "retries of a request that failed at a backend before it had any output"
    ] = 2
    retry_backoff_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000),
        "time before the first retry, doubled for each further one; longer if the only backend asks for that",
    ] = 250
    retry_budget_percent: Annotated[
        int, Meta(ge=0, le=100), "most retries, in percent of the requests, and ten more"
    ] = 20
    hedge_ms: Annotated[
        int,
        Meta(ge=0, le=3_600_000),
        "a request without output goes to a second backend as well when its deadline is this near; 0: never",
    ] = 0
    first_token_timeout_seconds: Annotated[
        PositiveCount, "how long a backend may be silent before the first output of a request"
    ] = 300
    silence_timeout_seconds: Annotated[PositiveCount, "how long it may be silent after that"] = 60
    probe_interval_ms: Annotated[
        int, Meta(ge=10, le=3_600_000), "time between checks of a backend's health and load"
    ] = 2000
    max_failures: Annotated[
        PositiveCount, "failures in a row after which a backend gets no requests until it answers a probe"
    ] = 5
    outage_seconds: Annotated[
        PositiveCount, "how long a request waits for a backend while none is up, before it fails with a 503"
    ] = 30


class RecordConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recording."""

    record: Annotated[
        str,
        Meta(extra={"metavar": "DIR", "off": "no trace"}),
        "folder for traces: DIR/<run>/trace.jsonl, DIR/latest; auto: the user's state folder for a server, none for "
        "other commands; empty: no trace",
    ] = AUTO
    record_tokens: Annotated[
        bool,
        "also write the token ids of prompts and outputs, to tokens.jsonl beside the trace; `eventlm replay "
        "--execute` needs them; anyone who can read that file can recover the texts",
    ] = False
    record_segment: Annotated[
        _Size, "length of a trace's files; each but the first begins with a snapshot, so that it can be read alone"
    ] = "256MiB"
    record_keep: Annotated[
        _Size, "how much of a run is kept, in the state folder of all runs together; the oldest files are removed first"
    ] = "1GiB"
    record_lag: Annotated[
        Literal["wait", "gap"],
        "what happens if the disk is slow; wait: the engine waits for it; gap: it goes on, and what takes too long is "
        "not recorded",
    ] = "wait"
    record_lag_ms: Annotated[
        int, Meta(ge=10), "with record_lag gap: how long a write may take before events are given up"
    ] = 1000
    record_lag_memory: Annotated[_Size, "with record_lag gap: how much may wait for a write before it is given up"] = (
        "64MiB"
    )
    record_sync: Annotated[
        Literal["none", "interval", "group"],
        "what a power failure may take of the trace; none: what the system has not written by itself; interval: what "
        "came within record_sync_ms; group: nothing that a client was shown, for which outputs wait for the disk",
    ] = "none"
    record_sync_ms: Annotated[int, Meta(ge=10), "with record_sync interval: how often the trace is synced"] = 1000
    recover: Annotated[
        str,
        Meta(extra={"metavar": "memory|DIR"}),
        "what a server's next engine goes on from when this one dies: requests and tokens, kept beside the trace; "
        "memory: in memory, which survives the process; DIR: in this folder, which survives the machine; empty: "
        "nothing",
    ] = ""
    checkpoint_events: Annotated[int, Meta(ge=1), "events between two digests of the state"] = 1000
    validate_every: Annotated[
        int, Meta(ge=0), "drains between two checks of the core's invariants, each of a part of the blocks; 0: never"
    ] = 1024

    @property
    def folder(self) -> str:
        """The folder to record to; empty if no trace was asked for."""
        return "" if self.record == AUTO else self.record


class LogConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logs, on standard error."""

    log_level: Annotated[
        Literal["auto", "debug", "info", "warning", "error"],
        "lowest level that is logged; auto: info for a server, warning for other commands",
    ] = "auto"
    log_format: Annotated[
        Literal["auto", "text", "json"], "text for people or JSON lines for programs; auto: text on a terminal only"
    ] = "auto"
    log_stats_interval_s: Annotated[
        int,
        Meta(ge=0),
        "seconds of work between two lines with the load, the throughput and the use of the cache; 0: no such lines",
    ] = 10


class TelemetryConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans for OpenTelemetry."""

    otlp_endpoint: Annotated[
        str,
        Meta(extra={"metavar": "URL"}),
        "send spans of all requests to this OTLP receiver over HTTP, such as http://127.0.0.1:4318 (without a path it "
        "is /v1/traces), by a process that follows the trace; headers come from OTEL_EXPORTER_OTLP_HEADERS; needs the "
        "extra otel and a record; empty: no spans",
    ] = ""


class ServiceClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class. Times in milliseconds, 0 for none: to the first token from the arrival (`deadline_ms`) and from the
    reception (`slo_ttft_ms`), and between tokens (`slo_tpot_ms`).
    """

    priority: Priority = 0
    deadline_ms: _Milliseconds = 0
    slo_ttft_ms: _Milliseconds = 0
    slo_tpot_ms: _Milliseconds = 0
    drop_if_late: bool = False


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration of an engine and its server. `classes` by name. replicasets: by name, the options that
    each has of its own (see `eventlm.config.replicasets`). models: by name, who else answers their requests.
    """

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    server: ServerConfig = ServerConfig()
    worker: WorkerConfig = WorkerConfig()
    gpu: GpuConfig = GpuConfig()
    parallel: ParallelConfig = ParallelConfig()
    gateway: GatewayConfig = GatewayConfig()
    record: RecordConfig = RecordConfig()
    log: LogConfig = LogConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    classes: dict[str, ServiceClass] = {}
    replicasets: dict[str, dict[str, Any]] = {}
    models: dict[str, ModelRules] = {}


def memory_bytes(size: str) -> int:
    """Bytes of a size such as `512MiB` or `1.5GB`, as the configuration has checked it."""
    match = _SIZE.fullmatch(size)
    assert match is not None, size
    return int(float(match[1]) * _SIZE_UNITS[match[2]])
