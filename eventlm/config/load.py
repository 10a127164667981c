"""From a TOML file, the environment and flags to one `Config`, or to an error that says what to change; and back.

A flag beats the environment, which beats the file, which beats the default.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import xxhash

from eventlm.config.model_rules import ModelRules, split_rules_spec
from eventlm.config.options import CLASSES, MODELS, REPLICASETS, Option, did_you_mean, nearest, options, sections
from eventlm.config.other_engines import name_elsewhere
from eventlm.config.plugin_spec import parse_parameters, parse_plugin_spec
from eventlm.config.replicasets import SECTIONS_OF_REPLICASETS, TOP_REPLICASET, split_replicaset_spec
from eventlm.config.secrets import hide_keys
from eventlm.config.structs import AUTO_CLASS, CLASS_NAME, Config, GatewayConfig, ServiceClass
from eventlm.errors import UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk

API_KEY_VARIABLE = "EVENTLM_API_KEY"

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
#: What tomllib says of a table that is there twice, and a key in that.
_DECLARED_TWICE, _KEY = re.compile(r"Cannot declare \((.*)\) twice"), re.compile(r"'([^']*)'")
_TOML_POSITION = re.compile(
    r"^(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$", re.S
)


def load_config(
    toml_path: str | Path | None,
    overrides: Mapping[str, Any] | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    are_flags: bool = True,
) -> Config:
    """The configuration of the file under the overrides.

    `overrides` are by option name (`max_model_len`); their values are typed, or strings as on the command
    line; those of `classes` are specs of whole classes such as `gold:priority=-10`, those of `models` specs of their
    rules such as `llama:fallback=small`, those of `replicasets` specs of
    options such as `small:model=smollm2,replicas=2`, or tables of options by name. `defaults` hold where neither has an
    option: values by option name, and tables of replicasets by theirs. `environment` is `os.environ` if
    not given. Unless the overrides `are_flags` they are keywords, and messages call them so. Raises UsageError that
    names file, section, key, value and what is allowed.
    """
    values: dict[str, Any] = dict(defaults or {})
    replicasets: dict[str, dict[str, Any]] = dict(values.pop(REPLICASETS, {}))
    if toml_path is not None:
        values.update(_file_values(Path(toml_path)))
    api_key = (os.environ if environment is None else environment).get(API_KEY_VARIABLE)
    if api_key:
        values["api_key"] = api_key
    classes: dict[str, ServiceClass] = values.pop(CLASSES, {})
    models: dict[str, ModelRules] = values.pop(MODELS, {})
    _add_tables(replicasets, values.pop(REPLICASETS, {}))
    for name, value in (overrides or {}).items():
        if name == CLASSES:
            classes |= dict(map(_class_of_spec, value))
            continue
        if name == MODELS:
            models |= dict(map(_rules_of_spec, value))
            continue
        if name == REPLICASETS:
            _add_tables(replicasets, _given_tables(value) if isinstance(value, dict) else _replicasets_of_specs(value))
            continue
        option = options().get(name)
        if option is None:
            hint = name_elsewhere(name, str) or did_you_mean(name, options())
            raise UsageError(f"unknown option {name!r}{hint}")
        values[name] = _given_value(option, value, is_flag=are_flags)
    if replicasets or values.get("backend"):
        # The default model is for an engine that has no other.
        values.setdefault("model", "")
    if replicasets:
        if values["model"] and "model" in replicasets.get(TOP_REPLICASET, {}):
            raise UsageError(
                f"two replicasets are called {TOP_REPLICASET}: the other is that of --model {values['model']}; give "
                "one another name, or leave that model out"
            )
        for key, table in replicasets.items():
            if not (table.get("model", values["model"]) or table.get("backend", values.get("backend"))):
                raise UsageError(f"the replicaset {key} has no model: give it one, or --model for those without")
    by_section: dict[str, dict[str, Any]] = {section: {} for section in sections()}
    for name, value in values.items():
        by_section[options()[name].section][name] = value
    return msgspec.convert({**by_section, CLASSES: classes, REPLICASETS: replicasets, MODELS: models}, Config)


def redacted(config: Config) -> dict[str, Any]:
    """The configuration by section and key, as a trace's header shows it: secrets as `***`."""
    tables: dict[str, Any] = msgspec.to_builtins(config)
    if not config.replicasets:
        # As before there were any.
        del tables[REPLICASETS]
    if not config.models:
        del tables[MODELS]
    for option in options().values():
        tables[option.section][option.name] = option.shown(tables[option.section][option.name])
    for table in tables.get(REPLICASETS, {}).values():
        for name, value in table.items():
            table[name] = options()[name].shown(value)
    if config.gateway == GatewayConfig():
        del tables["gateway"]
    return tables


def to_toml(config: Config) -> str:
    """All options, each under its description, as text that loads back to the same configuration.

    A secret that is set is not shown: it appears as a comment.
    """
    tables = msgspec.to_builtins(config)
    lines: list[str] = []
    for section, title in sections().items():
        lines += ["", f"# {title}", f"[{section}]"]
        for option in options().values():
            if option.section != section:
                continue
            lines += [f"# {option.description}", _line(option, tables[section][option.name])]
    for name, table in tables[CLASSES].items():
        lines += ["", f"# Service class {name}", f"[{CLASSES}.{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    for name, table in tables[REPLICASETS].items():
        lines += ["", f"# Replicaset {name}", f"[{REPLICASETS}.{name}]"]
        lines += [_line(options()[key], value) for key, value in table.items()]
    for name, table in tables[MODELS].items():
        lines += ["", f"# Rules of the model {name}", f"[{MODELS}.{_key(name)}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines[1:]) + "\n"


def _line(option: Option, value: object) -> str:
    """An option with its value; a comment if the value must not be shown as it is."""
    shown = option.shown(value)
    if shown == value:
        return f"{option.name} = {_toml(value)}"
    elsewhere = f"give it in {API_KEY_VARIABLE}" if option.name == "api_key" else "give keys by key_env or key_file"
    return f"# {option.name} = {_toml(shown)}  (set but not shown; {elsewhere})"


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


def _toml(value: object) -> str:
    """A value of an option. Texts are as in JSON, except that TOML forbids DEL as it stands."""
    if isinstance(value, dict) and value:
        return "{ " + ", ".join(f"{_key(key)} = {_toml(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def config_hash(tables: dict[str, Any]) -> str:
    """16 hex digits that two configurations share exactly if all their values are equal."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(tables, order="deterministic"))


def replace_fields(struct: _StructT, assignments: Mapping[str, Any], *, where: str) -> _StructT:
    """A copy of a frozen struct with some fields changed, for `--set key=value`.

    Raises UsageError that names the nearest field, or what the field must be, and where fields contradict each other.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(type(struct))}
    changes = {}
    for name, value in assignments.items():
        if name not in fields:
            raise UsageError(f"{where}: unknown key {name!r}{did_you_mean(name, fields, listed_as='known')}")
        try:
            changes[name] = msgspec.convert(value, fields[name])
        except msgspec.ValidationError as error:
            raise UsageError(f"{where}: {name}={value}: {lower_first(str(error))}") from None
    try:
        return msgspec.structs.replace(struct, **changes)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def lower_first(text: str) -> str:
    """`text` as the continuation of a sentence."""
    return text[:1].lower() + text[1:]


def _file_values(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, table in read_toml(path, what="the configuration").items():
        if section == CLASSES and isinstance(table, dict):
            values[CLASSES] = {
                name: _service_class(name, keys, f"{path}, [classes.{name}]") for name, keys in table.items()
            }
            continue
        if section == MODELS and isinstance(table, dict):
            values[MODELS] = {name: _model_rules(keys, f"{path}, [models.{name}]") for name, keys in table.items()}
            continue
        if section == REPLICASETS and isinstance(table, dict):
            values[REPLICASETS] = {
                name: _replicaset(name, keys, f"{path}, [replicasets.{name}]") for name, keys in table.items()
            }
            continue
        if section not in sections():
            raise UsageError(f"{path}: {_unknown_top_level(section, table)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {section} = {table!r}: must be a table, [{section}]")
        for name, value in table.items():
            option = options().get(name)
            if option is None or option.section != section:
                raise UsageError(f"{path}, [{section}]: {_unknown_key(section, name)}")
            try:
                values[name] = _checked(option, _plugin_table(option, value))
            except (msgspec.ValidationError, UsageError) as error:
                reason = f" ({error})" if isinstance(error, UsageError) else ""
                raise UsageError(
                    f"{path}, [{section}]: {name} = {_shown(option, value)}: must be {option.allowed}{reason}"
                ) from None
    return values


def _class_of_spec(spec: str) -> tuple[str, ServiceClass]:
    """A class as on the command line: NAME:KEY=VALUE,..."""
    name, _, keys = spec.partition(":")
    try:
        table = parse_parameters(keys, whole=spec) if keys else {}
    except UsageError as error:
        raise UsageError(f"--service-class: {error}") from None
    return name, _service_class(name, table, f"--service-class {spec}")


def _service_class(name: str, table: object, where: str) -> ServiceClass:
    if not CLASS_NAME.fullmatch(name) or name == AUTO_CLASS:
        raise UsageError(f"{where}: a class's name has 1 to 64 letters, digits, - or _, and is not {AUTO_CLASS}")
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table of {', '.join(ServiceClass.__struct_fields__)}")
    found = replace_fields(ServiceClass(), table, where=where)
    if found.drop_if_late and not found.deadline_ms and not found.slo_ttft_ms:
        raise UsageError(f"{where}: drop_if_late needs a deadline_ms or a slo_ttft_ms to be late for")
    return found


def _rules_of_spec(spec: str) -> tuple[str, ModelRules]:
    """The rules of a model as on the command line: NAME:KEY=VALUE,..."""
    name, keys = split_rules_spec(spec)
    try:
        table = parse_parameters(keys, whole=spec)
    except UsageError as error:
        raise UsageError(f"--model-rules: {error}") from None
    return name, _model_rules(table, f"--model-rules {spec}")


def _model_rules(table: object, where: str) -> ModelRules:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table of {', '.join(ModelRules.__struct_fields__)}")
    return replace_fields(ModelRules(), table, where=where)


def _add_tables(replicasets: dict[str, dict[str, Any]], more: Mapping[str, dict[str, Any]]) -> None:
    for name, table in more.items():
        replicasets[name] = replicasets.get(name, {}) | table


def _given_tables(tables: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Replicasets as tables, whose values are typed, or texts as on the command line."""
    return {name: _replicaset(name, table, f"--replicaset {name}", is_spec=True) for name, table in tables.items()}


def _replicasets_of_specs(specs: list[str]) -> dict[str, dict[str, Any]]:
    """Replicasets as on the command line, each NAME:KEY=VALUE,..."""
    found: dict[str, dict[str, Any]] = {}
    for spec in specs:
        name, table = split_replicaset_spec(spec, example="model=smollm2")
        where = f"--replicaset {hide_keys(spec)}"
        if name in found:
            raise UsageError(f"{where}: two replicasets are called {name}; give one another name")
        found[name] = _replicaset(name, table, where, is_spec=True)
    return found


def _replicaset(name: str, table: object, where: str, *, is_spec: bool = False) -> dict[str, Any]:
    """The options of a replicaset; of a spec values may be texts as on the command line."""
    if not CLASS_NAME.fullmatch(name):
        raise UsageError(f"{where}: a replicaset's name has 1 to 64 letters, digits, - or _")
    if not isinstance(table, dict):
        raise UsageError(f"{where}: must be a table of options such as model and replicas")
    found: dict[str, Any] = {}
    own = [option.name for option in options().values() if option.section in SECTIONS_OF_REPLICASETS]
    for key, value in table.items():
        if key in SECTIONS_OF_REPLICASETS and isinstance(value, dict):
            example = next(iter(value), "") or next(each for each in own if options()[each].section == key)
            raise UsageError(f"{where}: keys of [{key}] go directly under [replicasets.{name}], such as {example}")
        option = options().get(key)
        if option is None:
            raise UsageError(f"{where}: unknown key {key!r}{name_elsewhere(key, str) or did_you_mean(key, own)}")
        if key not in own:
            raise UsageError(f"{where}: {key} is the whole engine's; it belongs in the section [{option.section}]")
        try:
            found[key] = _read_value(option, value) if is_spec else _checked(option, _plugin_table(option, value))
        except (msgspec.ValidationError, UsageError) as error:
            reason = f" ({error})" if isinstance(error, UsageError) else ""
            raise UsageError(f"{where}: {key} = {_shown(option, value)}: must be {option.allowed}{reason}") from None
    return found


def _given_value(option: Option, value: object, *, is_flag: bool) -> object:
    try:
        return _read_value(option, value)
    except msgspec.ValidationError:
        given = f"{option.flag} " if is_flag else f"{option.name}="
        raise UsageError(f"{given}{_shown(option, value)}: must be {option.allowed}") from None
    except UsageError as error:
        raise UsageError(f"{option.flag if is_flag else option.name}: {error}") from None


def _read_value(option: Option, value: object) -> object:
    """A value that is typed, or a text as on the command line. Raises ValidationError or UsageError."""
    if not isinstance(value, str) or option.bare_type is str or option.choices:
        return _checked(option, value)
    if option.plugin_kind:
        return parse_plugin_spec(value)
    if option.bare_type == dict[str, Any]:
        return parse_parameters(value)
    if option.bare_type in (list[int], list[str]):
        return _checked(option, value.split(",") if value else [], strict=False)
    return _checked(option, value, strict=False)


def _checked(option: Option, value: object, *, strict: bool = True) -> object:
    if option.plugin_kind and not (isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"]):
        raise UsageError("`type` is missing")
    if isinstance(value, str):
        value = option.aliases.get(value, value)
    elif option.is_number and isinstance(value, int | float) and not isinstance(value, bool):
        value = repr(value)
    return msgspec.convert(value, option.type, strict=strict)


def _plugin_table(option: Option, value: object) -> object:
    return parse_plugin_spec(value) if option.plugin_kind and isinstance(value, str) else value


def _shown(option: Option, value: object) -> str:
    return repr(value) if option.hide is None else str(option.hide(value))


def read_toml(path: Path, *, what: str, disk: Disk = SYSTEM_DISK) -> dict[str, Any]:
    """The tables of a file that is to hold `what`. Raises UsageError with file, line and column."""
    try:
        text = disk.read(path).decode()
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        raise UsageError(f"{path}, line {line}, column {column}: not UTF-8") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        position = _TOML_POSITION.match(str(error))
        if position is None:
            raise UsageError(f"{path}: {lower_first(str(error))}") from error
        line = int(position["line"] or text.count("\n") + 1)
        column = int(position["column"] or len(text) - text.rfind("\n"))
        where = f"{path}, line {line}, column {column}"
        if twice := _DECLARED_TWICE.fullmatch(position["what"]):
            raise UsageError(
                f"{where}: [{'.'.join(_KEY.findall(twice[1]))}] appears twice; put its keys into one"
            ) from error
        raise UsageError(f"{where}: {lower_first(position['what'])} ({what} must be TOML)") from error


def _unknown_top_level(name: str, value: object) -> str:
    if name == CLASSES:
        return f"{name} = {value!r}: must be tables, one [classes.NAME] for each class"
    if name == REPLICASETS:
        return f"{name} = {value!r}: must be tables, one [replicasets.NAME] for each model"
    if name == MODELS:
        return f"{name} = {value!r}: must be tables, one [models.NAME] for each model with rules"
    if name in options() or not isinstance(value, dict):
        return _unknown_key("", name)
    return (
        f"unknown section [{name}]{did_you_mean(name, [*sections(), CLASSES, REPLICASETS, MODELS], listed_as='known')}"
    )


def _unknown_key(section: str, name: str) -> str:
    if name in options():
        return f"{name} belongs in the section [{options()[name].section}]"
    elsewhere = name_elsewhere(name, _with_section)
    if elsewhere:
        return f"unknown key {name!r}{elsewhere}"
    guess = nearest(name, options())
    if not guess:
        known = [option.name for option in options().values() if option.section == section] or sections()
        return f"unknown key {name!r}; known: {', '.join(known)}"
    where = guess if options()[guess].section == section else _with_section(guess)
    return f"unknown key {name!r}; did you mean {where}?"


def _with_section(name: str) -> str:
    return f"{name} in the section [{options()[name].section}]"
