"""Plug-ins by name: built-in, by entry point, by module:Class, and every way in which one can be wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from eventlm import __version__
from eventlm.config.plugin_spec import parse_plugin_spec
from eventlm.core.plugin import Policy
from eventlm.engine.plugins.registry import BUILT_IN, ResolvedPlugin, list_plugins, resolve
from eventlm.errors import UsageError
from eventlm.types import PluginKind

SHORTEST_FIRST = '''
import re
import sys
from typing import Any

import msgspec
from eventlm.core.plugin import Policy, Router


class ShortestFirst(Policy, frozen=True, kw_only=True):
    """The shortest prompt goes first.

    More on it.
    """

    weight: int
    name: str = "x"
    exact: bool = False

    def keys(self, sequences, now_ns):
        return [self.weight * sequence.prompt_tokens for sequence in sequences]


class Versioned(Router, frozen=True, kw_only=True):
    """A router with a version of its own."""

    version = "7.1"


class Picky(Policy, frozen=True, kw_only=True):
    share: float = 0.5

    def __post_init__(self):
        if self.share > 1:
            raise ValueError("share is at most 1")
        if self.share < 0:
            sys.exit(4)


class Endless(Policy, frozen=True, kw_only=True):
    limit: float = float("inf")


class Matching(Policy, frozen=True, kw_only=True):
    pattern: Any = re.compile("a")


class Keyed(Policy, frozen=True, kw_only=True):
    weights: dict[int, int] = msgspec.field(default_factory=lambda: {1: 2})


class Typed(Policy, frozen=True, kw_only=True):
    type: str = "x"


class Paired(Policy, frozen=True, kw_only=True):
    pair: tuple[int, float] = (1, 1 << 70)


not_a_class = 3


class NotAPolicy:
    pass
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with `shortest.py` in it; what is imported from it is forgotten at the end."""
    (tmp_path / "shortest.py").write_text(SHORTEST_FIRST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def install(folder: Path, entry_points: str, *, name: str = "third-party", version: str = "2.3") -> None:
    """What pip leaves of a distribution whose modules lie in `folder`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[eventlm.policies]\n{entry_points}\n")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def resolved(kind: PluginKind, text: str) -> ResolvedPlugin:
    return resolve(kind, parse_plugin_spec(text))


def error_of(kind: PluginKind, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(kind, text)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BUILT_IN.items() for name in names])
def test_every_built_in_resolves_with_its_defaults(kind: PluginKind, name: str) -> None:
    record = resolved(kind, name).record
    assert (record.kind, record.name, record.reference) == (kind, name, BUILT_IN[kind][name])
    assert (record.version, len(record.source_hash)) == (__version__, 16)


def test_a_record_has_all_parameters_and_leads_back_to_the_same_instance() -> None:
    first = resolved("policy", "edf:multiplier=2,min_deadline_ms=300")
    assert first.record.parameters["multiplier"] == 2
    assert first.record.parameters["evict_margin_ms"] == 10_000
    again = resolve("policy", {"type": first.record.reference, **first.record.parameters})
    assert again.instance == first.instance
    assert again.record.source_hash == first.record.source_hash


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("policy", "edff", "unknown policy 'edff'; did you mean edf? Installed: fcfs, edf, lrs"),
        (
            "router",
            "zzz",
            "unknown router 'zzz'; installed: round_robin, pull, least_loaded, prefix_affinity, session_affinity",
        ),
        ("policy", "pull", "pull is a router, not a policy; choose it with --router pull"),
        ("policy", "edf:multiplier", "parameters are written edf:PARAMETER=VALUE; 'multiplier' is not"),
        ("policy", "edf:multipler=2", "policy edf has no parameter 'multipler'; did you mean multiplier?"),
        ("policy", "fcfs:weight=2", "policy fcfs has no parameter 'weight' (it takes none)"),
        ("policy", "edf:multiplier=high", "policy edf: multiplier=high: must be a number above 0"),
        ("policy", "edf:multiplier=true", "policy edf: multiplier=true: must be a number above 0"),
        (
            "batcher",
            "fixed:max_chunk_tokens=1.5",
            "batcher fixed: max_chunk_tokens=1.5: must be an integer of at least 0",
        ),
        ("policy", "edf:multiplier=1e999", "policy edf: multiplier=inf: must be a finite number"),
        ("policy", "nowhere:Class", "plug-in 'nowhere:Class': no module 'nowhere' in "),
        ("policy", "eventlm.nowhere:Class", "no module 'eventlm.nowhere' in "),
        ("policy", "shortest:", "ends in a colon"),
    ],
)
def test_a_wrong_spec_is_explained(here: Path, kind: PluginKind, text: str, message: str) -> None:
    assert message in error_of(kind, text)


def test_a_class_of_a_file_in_the_current_directory(here: Path) -> None:
    plugin = resolved("policy", "shortest:ShortestFirst:weight=3,exact=true")
    assert isinstance(plugin.instance, Policy)
    assert plugin.record.reference == plugin.record.name == "shortest:ShortestFirst"
    assert plugin.record.parameters == {"weight": 3, "name": "x", "exact": True}


def test_parameters_are_as_a_trace_has_them(here: Path) -> None:
    record = resolved("policy", "shortest:Paired").record
    assert msgspec.json.decode(msgspec.json.encode(record.parameters)) == record.parameters == {"pair": [1, 1 << 70]}
    again = resolve("policy", {"type": record.name, **record.parameters})
    assert again.instance == resolved("policy", "shortest:Paired").instance


def test_a_class_states_its_version_or_has_that_of_its_distribution(here: Path) -> None:
    install(here, "short = shortest:ShortestFirst\nversioned = shortest:Versioned")
    assert resolved("policy", "short:weight=1").record.version == "2.3"
    assert resolved("router", "versioned").record.version == "7.1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shortest:ShortestFirst", "needs the parameter weight; write shortest:ShortestFirst:weight=VALUE"),
        ("shortest:ShortestFrst", "shortest has no class 'ShortestFrst'; did you mean ShortestFirst?"),
        (
            "shortest:NotAPolicy",
            "is not a policy: it must be a class derived from eventlm.core.plugin.Policy",
        ),
        ("shortest:not_a_class", "is not a policy"),
        ("shortest:Versioned", "shortest:Versioned is a router, not a policy; choose it with --router"),
        ("shortest:Picky:share=2", "policy shortest:Picky: share is at most 1"),
        ("shortest:Picky:share=-1", "shortest.py:37: SystemExit: 4"),
        ("shortest:Endless", "shortest:Endless: its parameters cannot be recorded: expected `float`, got `null`"),
        ("shortest:Matching", "its parameters cannot be recorded: encoding objects of type re.Pattern is unsupported"),
        ("shortest:Keyed", "its parameters cannot be recorded: expected `int`, got `str`"),
        ("shortest:Typed", "policy shortest:Typed: a parameter cannot be called `type`, which stands for the policy's"),
    ],
)
def test_a_wrong_class_is_explained(here: Path, text: str, message: str) -> None:
    assert message in error_of("policy", text)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("\n1 / 0\n", "importing broken failed at {here}/broken.py:2: ZeroDivisionError: division by zero"),
        ("def x(:\n", "importing broken failed at {here}/broken.py:1: SyntaxError: "),
        ("import sys\nsys.exit(5)\n", "importing broken failed at {here}/broken.py:2: SystemExit: 5"),
        ("import does_not_exist\n", "broken needs the module 'does_not_exist', which is missing"),
    ],
)
def test_a_module_that_cannot_be_imported_says_where(here: Path, source: str, message: str) -> None:
    (here / "broken.py").write_text(source)
    assert message.format(here=here) in error_of("policy", "broken:Policy")


def test_a_local_file_never_shadows_an_installed_module(here: Path) -> None:
    (here / "difflib.py").write_text("raise SystemExit('shadowed')")
    sys.modules.pop("difflib", None)
    assert "did you mean edf?" in error_of("policy", "edff")
    resolved("policy", "shortest:ShortestFirst:weight=1")
    sys.modules.pop("difflib", None)
    assert "did you mean edf?" in error_of("policy", "edff")


def test_an_entry_point_is_of_the_kind_of_its_base(here: Path) -> None:
    install(here, "short = shortest:ShortestFirst\nversioned = shortest:Versioned")
    assert resolved("policy", "short:weight=2").record.reference == "shortest:ShortestFirst"
    assert "versioned is a router, not a policy" in error_of("policy", "versioned")
    message = error_of("policy", "shrt")
    assert "did you mean short? Installed: fcfs, edf, lrs, lpm, short;" in message


def test_a_name_that_two_distributions_claim_is_ambiguous(here: Path) -> None:
    install(here, "short = shortest:ShortestFirst")
    install(here, "short = shortest:Picky", name="another", version="1.0")
    assert "'short' is ambiguous: another and third-party both have it" in error_of("policy", "short")


def test_a_built_in_name_cannot_be_taken(here: Path) -> None:
    install(here, "edf = shortest:ShortestFirst")
    assert resolved("policy", "edf").record.reference == "eventlm.policies.edf:Edf"


def test_the_hash_is_of_the_code_and_not_of_its_layout(here: Path) -> None:
    hashes = []
    for name, text in (
        ("unix", SHORTEST_FIRST),
        ("windows", SHORTEST_FIRST.replace("\n", "\r\n")),
        ("commented", SHORTEST_FIRST + "# the end\n"),
        ("other", SHORTEST_FIRST + "more = 1\n"),
    ):
        (here / f"{name}.py").write_bytes(text.encode())
        hashes.append(resolved("policy", f"{name}:Picky").record.source_hash)
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]


def test_the_list_has_everything_and_a_broken_one_says_why(here: Path) -> None:
    install(here, "short = shortest:ShortestFirst\nbroken = nowhere:Class\nodd = shortest:NotAPolicy")
    infos = {info.name: info for info in list_plugins()}
    built_in = {"fcfs", "edf", "lrs", "lpm", "fixed", "dynamic", "space_sharing", "pull"}
    assert set(infos) >= {*built_in, "short", "broken", "odd"}
    assert infos["edf"].parameters.startswith("multiplier=1.5, ")
    short = infos["short"]
    assert (short.kind, short.parameters, short.origin) == (
        "policy",
        "weight, name=x, exact=false",
        "third-party",
    )
    assert short.description == "The shortest prompt goes first."
    assert "no module 'nowhere'" in infos["broken"].problem
    assert "neither a policy nor a batcher nor a router" in infos["odd"].problem
