"""Launchers by name: built-in ones, those of other packages, and `module:Class`; imported only when chosen."""

from __future__ import annotations

from importlib import metadata

from eventlm.config import PluginSpec
from eventlm.config.options import did_you_mean
from eventlm.engine.plugins.registry import instantiate, load_class
from eventlm.errors import UsageError
from eventlm.launchers.launcher import Launcher

ENTRY_POINT_GROUP = "eventlm.launchers"
BUILT_IN = {
    "process": "eventlm.launchers.process:ProcessLauncher",
    "ray": "eventlm.launchers.ray.launcher:RayLauncher",
}


def resolve_launcher(spec: PluginSpec) -> Launcher:
    """The launcher that a spec names, with its parameters.

    Raises UsageError for an unknown name or parameter (with the nearest known one), a value of the wrong type, a module
    that cannot be imported, or a class that is no launcher.
    """
    name = str(spec["type"])
    launcher_class = load_class(name, _reference(name))
    if not (isinstance(launcher_class, type) and issubclass(launcher_class, Launcher)):
        raise UsageError(
            f"plug-in {name!r} is not a launcher: it must be a class derived from "
            f"{Launcher.__module__}.{Launcher.__name__}"
        )
    parameters = {key: value for key, value in spec.items() if key != "type"}
    launcher: Launcher = instantiate("launcher", name, launcher_class, parameters)
    return launcher


def _reference(name: str) -> str:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" in name:
        return name
    third_party = {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name not in third_party:
        hint = did_you_mean(name, [*BUILT_IN, *third_party], listed_as="installed")
        raise UsageError(f"unknown launcher {name!r}{hint}; a local one is written module:Class")
    return third_party[name]
