"""Backends as people write them: `http://HOST:PORT,key=KEY,max_concurrency=N`."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

BackendKind = Literal["vllm", "sglang", "llamacpp", "ollama", "openai", "eventlm"]


class BackendSpec(Struct, frozen=True, kw_only=True):
    """One other server. url: without a path behind the API's root, such as `http://10.0.0.2:8000`. key: what it wants
    as a bearer token; shown nowhere. kind: empty: found by asking. model: what it calls the model; empty: the only one
    that it serves. max_concurrency: most requests there at once; 0: what it says, else found by trying.
    weight: its share of the load against others'. ca_file, verify: how its certificate is checked.
    """

    url: str
    key: str = ""
    kind: BackendKind | None = None
    model: str = ""
    max_concurrency: int = 0
    weight: float = 1.0
    ca_file: str = ""
    verify: bool = True
