"""Every option of `Config` as data: where it stands, what it takes, what it says of itself.

The TOML reader, the command line and `--print-config` all work from this table, so that they cannot disagree.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta

from eventlm.config.core import MAX_NUMBER
from eventlm.config.structs import Config

#: The section whose tables are service classes, see `eventlm.config.structs`.
CLASSES = "classes"
#: The section whose tables are replicasets, see `eventlm.config.replicasets`.
REPLICASETS = "replicasets"
#: The section whose tables say who else answers requests for a model, see `eventlm.config.model_rules`.
MODELS = "models"
#: Options of the configuration that apply without a worker, a server and a recorder.
ENGINE_OPTIONS = (
    "policy", "extra_policy", "batcher", "router", "replicas", "max_model_len", "block_size", "num_blocks",
    "prefix_cache", "state_slots", "state_interval",
    "max_num_seqs", "max_num_batched_tokens", "max_queue_len", "max_steps_in_flight", "max_decodes_in_flight_per_seq",
    "run_ahead_ms", "max_skips", "max_evictions", "predictor",
    "tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size", "kv_shard_tokens",
    "micro_batches",
    "forward_retries", "retry_backoff_ms", "retry_budget_percent", "hedge_ms", "backend_cache_tokens",
)  # fmt: skip


_ALLOWED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list[int]: "a list of integers",
    list[str]: "a list of strings",
    dict[str, Any]: "a table of parameters",
}


class Option(NamedTuple):
    """One field of one section. `type` is its annotation with constraints, `bare_type` the type alone.

    The fields from `metavar` on come from `Meta.extra`, or follow from the type.
    """

    section: str
    name: str
    type: Any
    bare_type: Any
    default: Any
    description: str
    #: What the flag's help calls the value.
    metavar: str
    #: What the option takes, in words that end a sentence: "an integer from 0 to 65535".
    allowed: str
    #: The only values allowed; empty if the type says it all.
    choices: tuple[str, ...]
    #: Other words for some of the values.
    aliases: dict[str, str] = {}
    #: Kind of the plug-in that the value names; empty for any other value.
    plugin_kind: str = ""
    #: What is shown and recorded of the value, if it must not be shown as it is.
    hide: Callable[[Any], Any] | None = None
    #: The value, a string, may be given as a number too, which is kept as it is written.
    is_number: bool = False
    #: What leaving it empty means; then a flag `--no-<name>` does that. Empty if there is no such flag.
    off: str = ""

    def shown(self, value: Any) -> Any:
        """A value of the option without what is secret in it."""
        return value if self.hide is None else self.hide(value)

    @property
    def flag(self) -> str:
        """The command-line flag, `--max-model-len` for max_model_len."""
        return "--" + self.name.replace("_", "-")


@functools.cache
def options() -> MappingProxyType[str, Option]:
    """Every option by name, in the order of the sections and their fields."""
    found = (_option(section.name, field) for section in _sections() for field in msgspec.structs.fields(section.type))
    return MappingProxyType({option.name: option for option in found})


def _option(section: str, field: msgspec.structs.FieldInfo) -> Option:
    bare_type, *annotations = get_args(field.type)
    limits = next((each for each in annotations if isinstance(each, Meta)), Meta())
    default = field.default if field.default is not NODEFAULT else field.default_factory()
    choices = get_args(bare_type) if get_origin(bare_type) is Literal else ()
    extra = dict(limits.extra or {})
    allowed = allowed_values(field.type)
    if choices:
        shown = "{" + ",".join(choices) + "}"
    elif "plugin_kind" in extra:
        shown, allowed = "SPEC", "NAME, NAME:PARAMETER=VALUE,... or a table with `type` and parameters"
    else:
        shown = "N" if bare_type is int else "VALUE"
    given = {"metavar": shown, "allowed": allowed} | extra
    return Option(section, field.name, field.type, bare_type, default, annotations[-1], choices=choices, **given)


@functools.cache
def sections() -> MappingProxyType[str, str]:
    """Every section of the TOML file that holds options, and its title."""
    titles = {field.name: (field.type.__doc__ or "").split("\n")[0].rstrip(".") for field in _sections()}
    return MappingProxyType(titles)


def _sections() -> list[msgspec.structs.FieldInfo]:
    """Service classes, replicasets and models are no options: users make up their names."""
    return [field for field in msgspec.structs.fields(Config) if field.name not in (CLASSES, REPLICASETS, MODELS)]


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` is a slip of, or '' if none is; the dashes of flags do not make them alike."""
    import difflib  # 5 ms that only a mistake costs

    bare = word.lstrip("-")
    by_bare = {each.lstrip("-"): each for each in sorted(known)}
    # What is that much longer is near to none, and may come from a client: to compare megabytes takes seconds.
    if len(bare) > 3 * max(map(len, by_bare), default=0):
        return ""
    # Two letters that changed places are much of a short word.
    cutoff = 0.66 if len(bare) < 5 else 0.75
    return next((by_bare[each] for each in difflib.get_close_matches(bare, by_bare, n=1, cutoff=cutoff)), "")


def did_you_mean(word: str, known: Iterable[str], *, listed_as: str = "") -> str:
    """What a message on an unknown word ends with: the nearest known one, and all of them if they are `listed_as`.

    `; did you mean edf? Installed: fcfs, edf`, without a near one `; installed: fcfs, edf`.
    """
    known = list(known)
    guess = nearest(word, known)
    question = f"; did you mean {guess}?" if guess else ""
    if not listed_as:
        return question
    words = f"{listed_as}: {', '.join(known)}"
    return f"{question} {words[0].upper()}{words[1:]}" if guess else f"; {words}"


def allowed_values(type_: Any) -> str:
    """What a field of this type takes, in words that end a sentence: "an integer from 0 to 65535". Empty where only
    the type can say it.
    """
    bare_type, *annotations = get_args(type_) if get_origin(type_) is Annotated else [type_]
    if get_origin(bare_type) is Literal:
        return "one of " + ", ".join(map(str, get_args(bare_type)))
    limits = next((each for each in annotations if isinstance(each, Meta)), Meta())
    return _ALLOWED[bare_type] + _range(limits) if bare_type in _ALLOWED else ""


def _range(meta: Meta) -> str:
    if meta.ge is not None and meta.le == MAX_NUMBER:
        return f" of at least {meta.ge}, below 2^63"
    if meta.ge is not None and meta.le is not None:
        return f" from {meta.ge} to {meta.le}"
    if meta.ge is not None:
        return f" of at least {meta.ge}"
    if meta.gt is not None:
        return f" above {meta.gt}"
    return ""
