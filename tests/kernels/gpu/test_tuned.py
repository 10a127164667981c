from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eventlm.kernels.gpu import tuned as module
from eventlm.kernels.gpu.tuned import ceil_div, next_power_of_2, tuned

TEXT = """\
# What this is.

[[op]]
gpu = "default"
config = { BLOCK = 1 }

[[op]]
gpu = "default"
shape = { dtype = "float32", head_dim = 64, max_rows = 8 }
config = { BLOCK = 2 }

[[op]]
gpu = "Big"
shape = { max_rows = 16 }
config = { BLOCK = 3 }

[[op]]
gpu = "Big"
shape = { max_rows = 64 }
config = { BLOCK = 4 }

[[op]]
gpu = "Big"
shape = { head_dim = 64, max_rows = 64 }
config = { BLOCK = 5 }

[[op]]
gpu = "Big"
shape = { cached = "fp8" }
config = { BLOCK = 6 }
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tuned.toml"
    path.write_text(TEXT)
    monkeypatch.setattr(module, "PATH", path)
    forget()
    yield path
    forget()


def forget() -> None:
    module._entries.cache_clear()
    tuned.cache_clear()


def at(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    monkeypatch.setattr(module, "gpu_name", lambda: gpu)


def test_the_entry_that_asks_for_most_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "Big")
    assert tuned("op", rows=16, head_dim=128) == {"BLOCK": 3}
    assert tuned("op", rows=17, head_dim=128) == {"BLOCK": 4}
    assert tuned("op", rows=17, head_dim=64) == {"BLOCK": 5}
    # Of this GPU before one of any that asks for more.
    assert tuned("op", rows=8, head_dim=64, dtype="float32") == {"BLOCK": 5}
    assert tuned("op", rows=65, head_dim=64) == {"BLOCK": 1}
    # A value before a bound.
    assert tuned("op", rows=8, cached="fp8") == {"BLOCK": 6}
    assert tuned("op") == {"BLOCK": 1}


def test_another_gpu_takes_the_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, "Small")
    assert tuned("op", rows=16) == {"BLOCK": 1}
    assert tuned("op", rows=8, head_dim=64, dtype="float32") == {"BLOCK": 2}
    assert tuned("op", rows=8, head_dim=64, dtype="float16") == {"BLOCK": 1}


def test_what_has_no_entry_is_named(path: Path) -> None:
    with pytest.raises(LookupError, match=r"no configuration of other for \{'rows': 3\} on .*: add one of gpu"):
        tuned("other", rows=3)


def test_every_operation_has_a_default() -> None:
    for op, entries in module._entries().items():
        assert tuned(op)
        assert all(isinstance(number, int) for entry in entries for number in entry["config"].values()), op


def test_quotients_rounded_up() -> None:
    assert [ceil_div(number, 4) for number in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]


def test_powers_of_two() -> None:
    assert [next_power_of_2(number) for number in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert next_power_of_2((1 << 20) + 1) == 1 << 21
