"""What is drawn from a seed if other servers run the model: the backends, the gateway's flags, and its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from eventlm.config import Config, ModelConfig, SchedulerConfig, WorkerConfig
from eventlm.config.backends import BackendKind
from eventlm.config.structs import GatewayConfig
from tests.gateway.stub_backend import chat_prompt, reply_text
from tests.gateway.stub_faults import AT_END, Fault
from tests.world.machine.draws import Draws

#: The port of all backends; those found by DNS share it.
PORT = 9000
NAME = "pods"
#: The file that lists the backends, if the gateway uses one.
LIST = Path("/etc/backends")
_ROUTERS = ("pull", "round_robin", "least_loaded", "prefix_affinity", "session_affinity")
_KINDS: tuple[BackendKind, ...] = ("vllm", "sglang", "llamacpp", "ollama", "openai", "eventlm")
#: How many requests of one backend may have a fault.
_NUM_REQUESTS = 100
_HTML = "<html><body>Bad Gateway</body></html>"
#: Token counts that no answer can have.
_COUNTS = (-7, 0, (1 << 31) - 1, 1 << 31, 10**30)
_REPLIES = (
    (429, "", ""), (429, "1", ""), (429, "30", ""), (429, "600", ""), (429, "soon", ""), (500, "", ""),
    (502, "", _HTML), (503, "2", ""), (408, "", ""), (400, "", ""), (404, "", ""), (200, "", ""),
    (200, "", _HTML), (302, "", ""),
)  # fmt: skip
_STREAMS: tuple[Literal["stall", "endless", "cut", "end", "malformed", "error"], ...] = (
    "stall", "endless", "cut", "end", "malformed", "error",
)  # fmt: skip


#: How the gateway learns of its backends.
Listing = Literal["flags", "DNS", "file"]
_LISTINGS: tuple[Listing, ...] = ("flags", "DNS", "file")


class BackendPlan(NamedTuple):
    """One of the backends. host: its address. options: those of the stub. faults: which requests go wrong, and how."""

    host: str
    kind: BackendKind
    options: dict[str, Any]
    faults: list[Fault]


class GatewayPlan(NamedTuple):
    """A gateway and its backends. answer_tokens: length of each answer, unless a request asks for less. specs: one for
    each backend, without `key`. key: the key that all backends require; empty: they require none.
    """

    backends: list[BackendPlan]
    answer_tokens: int
    listing: Listing
    specs: list[str]
    key: str

    @property
    def flags(self) -> list[str]:
        """How the gateway's flags name the backends."""
        found = {"flags": self.specs, "DNS": [f"dns:{NAME}:{PORT}"], "file": [f"file:{LIST}"]}[self.listing]
        return [f"{each},key={self.key}" if self.key else each for each in found]

    def answer(self, body: dict[str, Any], index: int) -> tuple[str, set[str]]:
        """The full text of a choice, and the finish reasons that are allowed."""
        most = body.get("max_tokens") or body["max_completion_tokens"]
        prompt = chat_prompt(body["messages"]) if "messages" in body else str(body["prompt"])
        reasons = {"stop"} if most >= self.answer_tokens else set()
        # A request that is retried when nothing is left to generate ends by its limit.
        reasons |= {"length"} if most <= self.answer_tokens else set()
        return reply_text(prompt, body["seed"] + index, min(most, self.answer_tokens)), reasons


def draw_gateway(draws: Draws, *, is_calm: bool) -> GatewayPlan:
    """Draw the backends of a seed."""
    answer_tokens = draws.between(1, 100, "answer tokens")
    listing = _LISTINGS[draws.draw("listing") % len(_LISTINGS)]
    key = f"sk-of-backends-{draws.draw('backend key', 1):016x}" if draws.draw("backend key") % 2 == 0 else ""
    num_backends = draws.between(1, 4, "backends")
    share_ppm = 0 if is_calm else draws.between(0, 400_000, "share of faults")
    backends = [_draw_backend(draws, number, answer_tokens, share_ppm) for number in range(num_backends)]
    # With DNS, the gateway knows nothing about a backend but its address.
    specs = [f"http://{each.host}:{PORT}" if listing == "DNS" else _draw_spec(draws, each) for each in backends]
    return GatewayPlan(
        [each._replace(options=each.options | {"key": key}) for each in backends], answer_tokens, listing, specs, key
    )


def _draw_backend(draws: Draws, number: int, answer_tokens: int, share_ppm: int) -> BackendPlan:
    def between(least: int, most: int, what: str) -> int:
        return draws.between(least, most, f"backend {what}", number)

    kind = _KINDS[between(0, len(_KINDS) - 1, "kind")]
    options = {
        "model": "m",
        "num_tokens": answer_tokens,
        "max_model_len": 1024,
        "first_delay": between(0, 1500, "first") / 1000,
        "token_delay": between(0, 60, "each") / 1000,
        # llama.cpp sends each token as soon as it is generated.
        "tokens_per_chunk": 1 if kind == "llamacpp" else between(1, 4, "chunk"),
        "max_concurrency": between(0, 4, "places"),
        "cache_blocks": between(0, 2, "cache") * 50,
        "metrics": between(0, 3, "metrics") > 0,
    }
    numbers = [n for n in range(1, _NUM_REQUESTS) if draws.happens(share_ppm, "backend fault", number, n)]
    return BackendPlan(
        f"10.0.0.{number + 1}",
        kind,
        options,
        [_draw_fault(draws, number, n) for n in numbers],
    )


def _draw_fault(draws: Draws, backend: int, number: int) -> Fault:
    """Draw what goes wrong with one request of a backend."""

    def between(least: int, most: int, what: str) -> int:
        return draws.between(least, most, f"backend fault {what}", backend, number)

    after = between(0, 60, "after")
    match between(0, 9, "kind"):
        case 0:
            return Fault("hang", numbers=(number,))
        case 1:
            return Fault("late", numbers=(number,), seconds=between(1, 60, "seconds"))
        case 2:
            return Fault("twice", numbers=(number,), after=AT_END)
        case 3:
            count = _COUNTS[between(0, len(_COUNTS) - 1, "count")]
            return Fault("absurd", numbers=(number,), after=AT_END, count=count)
        case 4 | 5 | 6:
            status, retry_after, body = _REPLIES[between(0, len(_REPLIES) - 1, "reply")]
            return Fault("status", numbers=(number,), status=status, retry_after=retry_after, body=body)
        case _:
            kind = _STREAMS[between(0, len(_STREAMS) - 1, "stream")]
            return Fault(kind, numbers=(number,), after=after)


def draw_gateway_config(draws: Draws, plan: GatewayPlan, config: Config, probe_ms: int) -> Config:
    """Draw a gateway's flags. config: of a server with its own workers, used for all other flags. probe_ms: time
    between two probes of a backend.
    """

    def between(least: int, most: int, what: str) -> int:
        return draws.between(least, most, f"gateway {what}")

    return Config(
        model=ModelConfig(model=""),
        scheduler=SchedulerConfig(
            policy=config.scheduler.policy,
            extra_policy=config.scheduler.extra_policy,
            router={"type": _ROUTERS[draws.draw("router") % len(_ROUTERS)]},
            max_num_seqs=between(1, 32, "seqs"),
        ),
        gateway=GatewayConfig(
            backend=plan.flags,
            max_backends=between(0, 1, "room") * len(plan.backends),
            backend_cache_tokens=between(64, 4096, "cache"),
            forward_retries=between(0, 4, "retries"),
            retry_backoff_ms=1 << between(0, 12, "backoff"),
            retry_budget_percent=between(0, 100, "budget"),
            hedge_ms=between(0, 1, "hedges") * between(1, 20_000, "hedge"),
            first_token_timeout_seconds=between(2, 60, "first"),
            silence_timeout_seconds=between(1, 30, "silence"),
            probe_interval_ms=probe_ms,
            max_failures=between(1, 6, "failures"),
            outage_seconds=between(1, 60, "outage"),
        ),
        server=config.server,
        # This is also the heartbeat timeout of front ends.
        worker=WorkerConfig(heartbeat_timeout_seconds=config.worker.heartbeat_timeout_seconds),
        record=config.record,
        classes=config.classes,
    )


def _draw_spec(draws: Draws, backend: BackendPlan) -> str:
    spec = f"http://{backend.host}:{PORT}"
    if draws.draw(f"spec kind {backend.host}") % 2 == 0:
        spec += f",kind={backend.kind}"
    if draws.draw(f"spec limit {backend.host}") % 3 == 0:
        spec += f",max_concurrency={draws.between(1, 8, f'spec limit {backend.host}', 1)}"
    if draws.draw(f"spec weight {backend.host}") % 3 == 0:
        spec += ",weight=2"
    return spec


def draw_body(draws: Draws, number: int, body: dict[str, Any]) -> dict[str, Any]:
    """Change a request's body into one for a gateway."""

    def one_of(count: int, what: str) -> bool:
        return draws.draw(f"body {what}", number) % count == 0

    body = dict(body)
    # The stop string was taken from another text.
    body.pop("stop", None)
    if "prompt" in body and one_of(3, "ids"):
        body["prompt"] = [draws.between(1, 9999, "body id", number, each) for each in range(20)]
        body["return_token_ids"] = one_of(2, "return ids")
    if one_of(6, "penalty"):
        body["presence_penalty"] = 0.5
    if body["stream"] and one_of(2, "usage"):
        body["stream_options"] = {"include_usage": True}
    if one_of(3, "session"):
        body["session_id"] = f"session {number % 3}"
    return body
