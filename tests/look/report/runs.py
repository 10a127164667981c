"""Runs that something is special about."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventlm.bus.log_writer import LogWriter
from eventlm.events import Event
from eventlm.system.clock import SystemClock
from eventlm.system.system import real_system
from tests.bus.slow_disk import SlowDisk
from tests.replay.golden import FOLDER
from tests.replay.traces import indices, tampered
from tests.simulation import Simulation

GOLDEN = FOLDER / "fcfs_one_replica.jsonl"
#: What may go wrong where text becomes HTML, a script, JSON, a style, a link, a pattern, or a line of the terminal.
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script>",
    "<img src=x onerror=alert(3)>",
    "<svg/onload=alert(4)>",
    "<!--",
    "-->",
    "<![CDATA[x]]>",
    "</title><b>",
    "</style><style>*{display:none}",
    '"><iframe src="https://example.com">',
    "' onmouseover='alert(5)",
    "javascript:alert(6)",
    "https://example.com/x.js",
    "data:text/html,<b>x",
    "&lt;b&gt;&amp;",
    "${alert(7)}",
    "{{constructor.constructor('alert(8)')()}}",
    "\\u003cscript\\u003e",
    "\\",
    "`",
    "\u2028\u2029",
    "\u202eabc",
    "\u0000\u0007\u001b[31m",
    "%3Cscript%3E",
    "__proto__",
    "constructor",
    "toString",
    "👩‍👩‍👧‍👦é",
    "w" * 250,
    "expression(alert(9));background:url(//example.com)",
]


def record_with_gap(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run during which the disk was full for sixty events."""
    disk = SlowDisk(monkeypatch)
    clock = [1000.0]
    monkeypatch.setattr(SystemClock, "monotonic_ns", lambda _: int(clock[0] * 1e9))
    with LogWriter(real_system(), folder, f"gap-{seed}") as writer:
        simulation = Simulation(seed, writer=writer, check_every=0)

        def fill_disk(event: Event) -> None:
            if event.s in (150, 210):
                disk.num_full = (1 << 30) * (event.s == 150)
                clock[0] += 100

        simulation.engine_core.bus.attach(fill_disk)
        simulation.run()
    return Path(writer.run_folder)


def write_empty(path: Path) -> Path:
    """A run in which nothing happened."""

    def empty(objects: list[dict[str, object]]) -> None:
        del objects[1:-1]
        # The encoder leaves zeros out.
        del objects[-1]["c"], objects[-1]["ts"]

    return tampered(GOLDEN, path, empty)


def write_hostile(path: Path) -> Path:
    """A run with a hostile text wherever a trace has a text that is not one of a few."""
    texts = iter(HOSTILE * 20)

    def change(objects: list[dict[str, object]]) -> None:
        header: dict[str, object] = objects[0]
        header["run"] = next(texts).replace("/", "∕")
        for name in ("code_version", "model_fingerprint", "config_hash"):
            header[name] = next(texts)
        header["core"]["models"] = [next(texts)]  # type: ignore[index]
        header["config"] = {text: {text: text} for text in HOSTILE}
        header["host"] = {text: text for text in HOSTILE}
        for plugin in header["plugins"]:  # type: ignore[attr-defined]
            plugin.update(name=next(texts), version=next(texts), parameters={next(texts): next(texts)})
        for place in indices(objects, "arrive"):
            objects[place].setdefault("scheduling", {}).update(  # type: ignore[attr-defined]
                service_class=next(texts),
                model=header["core"]["models"][0],  # type: ignore[index]
            )
        last = objects[-2]
        more = [{"t": "mark", "s": 0, "ts": last["ts"], "c": 0, "text": text} for text in HOSTILE]
        more += [{"t": "plugin_failed", "s": 0, "ts": last["ts"], "c": 0, "error": text} for text in HOSTILE]
        more.append(
            {"t": "worker_lost", "s": 0, "ts": last["ts"], "c": 0, "replica": 0, "epoch": 1, "reason": HOSTILE[0]}
        )
        objects[-1:-1] = more

    return tampered(GOLDEN, path, change)
