"""Options of the HTTP server: section [server]."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from eventlm.config.sizes import PATTERN as SIZE_PATTERN
from eventlm.sampling_params import Pooling


class ServerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """HTTP server."""

    host: Annotated[
        str,
        Meta(
            extra={"metavar": "ADDRESS"},
            description="address to bind; anything but loopback exposes the server",
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to bind; 0 takes a free one")] = 8000
    api_key: Annotated[
        str,
        Meta(
            extra={"metavar": "KEY", "secret": True},
            description="key that clients must send as a bearer token; better set EVENTLM_API_KEY",
        ),
    ] = ""
    api_keys_file: Annotated[
        str,
        Meta(
            extra={"metavar": "FILE"},
            description="TOML file of API keys, a table [[keys]] for each: name, key or its sha256, scopes (inference, "
            "admin), service_class, limits; read again when it changes",
        ),
    ] = ""
    requests_choose_class: Annotated[
        Literal["auto", "always", "never"],
        Meta(
            description="whether requests may choose any service class, and a better priority than that of their "
            "class; auto: unless a key has a class"
        ),
    ] = "auto"
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 16 * 1024 * 1024
    body_memory: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"},
            description="memory for the bodies of all running requests, in each process that serves HTTP; beyond it "
            "a request gets a 503",
        ),
    ] = "1GiB"
    pooling: Annotated[
        Pooling,
        Meta(
            description="default pooling of embeddings: the hidden state of the last token, or the mean of all tokens"
        ),
    ] = "last"
    api_servers: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="processes for HTTP, templates and tokenizing beside the engine's; 0: the engine's own "
            "process does it",
        ),
    ] = 0
    max_connections: Annotated[
        int,
        Meta(
            ge=1,
            description="most connections at once, shared equally among --api-servers; one more gets a 503 and is "
            "closed, or with TLS is closed before its handshake",
        ),
    ] = 4096
    header_timeout_seconds: Annotated[
        int, Meta(ge=1, description="how long a client may take for the TLS handshake and for the head of a request")
    ] = 20
    body_timeout_seconds: Annotated[int, Meta(ge=1, description="how long a client may take for a request's body")] = 60
    idle_timeout_seconds: Annotated[
        int, Meta(ge=1, description="how long a connection may idle between requests before it is closed")
    ] = 75
    tls_cert: Annotated[
        str,
        Meta(
            extra={"metavar": "FILE"},
            description="certificate chain in PEM; with --tls-key the server speaks HTTPS, TLS 1.2 or newer. SIGHUP "
            "reads both again",
        ),
    ] = ""
    tls_key: Annotated[str, Meta(extra={"metavar": "FILE"}, description="the certificate's private key in PEM")] = ""
    cors_origin: Annotated[
        list[str],
        Meta(
            extra={"metavar": "ORIGIN"},
            description="origin of a web page that may use the server from browsers, such as "
            "https://chat.example.com; * for all; may be repeated",
        ),
    ] = []
    drain_seconds: Annotated[
        int, Meta(ge=0, description="how long requests may run after SIGTERM before they are cancelled")
    ] = 30
    resume_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400,
            description="how long a stream goes on after its client lost the connection, and can be resumed with GET "
            "/v1/stream/ID and Last-Event-ID; 0: it is cancelled at once",
        ),
    ] = 0
    resume_memory: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 256MiB or 1GiB"},
            description="memory for streams that can be resumed; beyond it the oldest can no longer be resumed",
        ),
    ] = "256MiB"
    max_stream_buffer: Annotated[
        str,
        Meta(
            pattern=rf"^{SIZE_PATTERN}$",
            extra={"metavar": "SIZE", "allowed": "a size such as 64KiB or 1MiB"},
            description="bytes of a stream that may wait for a client that reads slowly; beyond it events are joined "
            "into fewer, larger chunks",
        ),
    ] = "64KiB"
    write_timeout_seconds: Annotated[
        int,
        Meta(ge=1, description="time after which a client that reads nothing is disconnected"),
    ] = 60
    tool_parser: Annotated[
        str,
        Meta(
            extra={
                "metavar": "NAME",
                "allowed": "auto, none, hermes, llama3_json, an installed parser or module:Class",
            },
            description="format of tool calls: hermes, llama3_json, another installed one or module:Class; auto takes "
            "what the chat template shows, none leaves calls in the text",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        Meta(
            extra={"metavar": "NAME", "allowed": "auto, none, qwen3, deepseek_r1, an installed parser or module:Class"},
            description="format of reasoning: qwen3, deepseek_r1, another installed one or module:Class; auto takes "
            "what the chat template shows, none leaves reasoning in the text",
        ),
    ] = "auto"
