"""The composition root: from a configuration to an engine and what its edges need."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from msgspec import structs

from eventlm.bootstrap.backends import AskedSet, backends_setup
from eventlm.bootstrap.cache_plan import (
    Neighbours,
    check_kv_memory,
    num_kv_pools,
    plan_cache,
    plan_states,
    weight_bytes_of,
)
from eventlm.bootstrap.device import OF_GPUS, OF_PROCESSORS, choose_device
from eventlm.bootstrap.gpus import Gpu
from eventlm.bootstrap.model_source import ModelSource, find_model
from eventlm.bootstrap.num_workers import check_room_for_workers, thread_warnings
from eventlm.bootstrap.option_checks import check_gateway_is_used, check_options_of_set, errors_of_set
from eventlm.bootstrap.rank_parts import plans_here, rank_memory
from eventlm.bootstrap.text_parts import ServedText, load_text
from eventlm.config import Config, RecordConfig
from eventlm.config.model_rules import check_model_rules
from eventlm.config.options import options
from eventlm.config.replicasets import check_sets, configs_of_replicasets, keys_of_further
from eventlm.config.structs import memory_bytes
from eventlm.engine.inference_engine import InferenceEngine
from eventlm.engine.setup import EngineSetup, layout_of, make_setup, num_own_workers, worker_setups
from eventlm.errors import UsageError
from eventlm.formatting import counted
from eventlm.models.config import check_runs_on_gpu, resolve_dtype
from eventlm.models.cpu_kernels import ForwardChoice, choose_build, choose_forward, choose_operations
from eventlm.models.facts import ModelFacts
from eventlm.models.program import WeightKey
from eventlm.models.quantized.scheme import CONFIG_FILE
from eventlm.models.served import read_served
from eventlm.models.spec import ModelSpec, why_not_plain
from eventlm.models.transformers_model import TransformersModel, check_files
from eventlm.models.weights.find_weights import find_weights
from eventlm.models.weights.matrix_types import gpu_types, matrix_types
from eventlm.sampling_params import SamplingParams
from eventlm.system.system import System, real_system
from eventlm.telemetry.endpoint import headers_of, traces_url
from eventlm.text.fake_tokenizer import FakeTokenizer
from eventlm.text.tokenizer import Tokenizer
from eventlm.worker.protocol import FAKE_MODEL
from eventlm.worker.rank_memory import RankMemory
from eventlm.worker.ranks.shard import check_layout

#: Options of what computes a model that has weights; the fake worker reads none of them.
_OF_WEIGHTS = ("dtype", "quantization", "model_impl", "kv_memory", "kv_cache_dtype", "device", *OF_PROCESSORS, *OF_GPUS)

#: Of eventlm's own forward passes.
_OF_OUR_FORWARD_PASSES = ("quantization",)


class Composition(NamedTuple):
    """An engine that has not been started, its tokenizer, and what a request gets that does not say otherwise.

    `vocab_size` and `facts` are the model's; `warnings` are for the user. others: the same of further replicasets.
    """

    engine: InferenceEngine
    tokenizer: Tokenizer
    defaults: SamplingParams
    vocab_size: int
    facts: ModelFacts
    warnings: list[str]
    others: list[ServedText] = []


def compose(
    config: Config,
    *,
    tokenizer_folder: str = "",
    all_sets: bool = False,
    backends: Mapping[str, AskedSet] = MappingProxyType({}),
    system: System | None = None,
) -> Composition:
    """Find the model, size the cache, resolve the plug-ins. Everything that can be wrong is found before a start.

    `tokenizer_folder`, if given, has the tokenizer to be used in place of the model's own, which need not be there.
    all_sets: of a configuration with several replicasets, make all of them and not the first alone. backends: what
    `ask_backends` has found. system: what the engine runs on; None: this host. Raises UsageError, CheckpointError or
    PullError.
    """
    engine, warnings = compose_engine(
        config, tokenizer_folder=tokenizer_folder, all_sets=all_sets, backends=backends, system=system
    )
    first, *others = [load_text(setup.model, setup.config.model.model_impl, setup.tokenizer) for setup in engine.setups]
    return Composition(
        engine,
        first.tokenizer,
        first.defaults,
        engine.setup.vocab_size,
        first.facts,
        warnings,
        [
            ServedText(setup.core.models, text, setup.vocab_size, setup.core.num_replicas * setup.core.max_residents)
            for setup, text in zip(engine.setups[1:], others, strict=True)
        ],
    )


def compose_engine(
    config: Config,
    *,
    tokenizer_folder: str = "",
    all_sets: bool = False,
    backends: Mapping[str, AskedSet] = MappingProxyType({}),
    system: System | None = None,
) -> tuple[InferenceEngine, list[str]]:
    """As `compose`, without a tokenizer: an engine that has not been started, and warnings for the user."""
    _check_record(config.record)
    _check_telemetry(config)
    configs = configs_of_replicasets(config)
    if not all_sets:
        configs = dict([next(iter(configs.items()))])
    check_gateway_is_used(configs.values())
    found = {}
    for name, own in configs.items():
        with errors_of_set(name, is_alone=len(configs) == 1):
            if not own.gateway.backend:
                found[name] = _find_parts(own)
            elif name not in backends:
                raise UsageError("--backend is for `eventlm serve`: this command runs its own workers")
    weights = {name: parts.weight_bytes for name, parts in found.items()} if len(found) > 1 else {}
    setups: list[EngineSetup] = []
    warnings: list[str] = []
    for name in configs:
        with errors_of_set(name, is_alone=len(configs) == 1):
            if name in found:
                others = [parts.config for each, parts in found.items() if each != name]
                neighbours = Neighbours(
                    num_replicas=sum(own.scheduler.replicas for own in others if plans_here(own)),
                    num_bytes=sum(weights.values()) - weights.get(name, 0),
                    num_pools=sum(map(num_kv_pools, others)),
                )
                setup, own_warnings = _make_set(found[name], tokenizer_folder, neighbours)
            else:
                setup, own_warnings = backends_setup(configs[name], backends[name]), backends[name].warnings
        if len(configs) > 1:
            setup = structs.replace(
                setup,
                name=name,
                first_replica=sum(each.core.num_replicas for each in setups),
                first_worker=sum(num_own_workers(each.config) for each in setups),
                num_workers=sum(map(num_own_workers, configs.values())),
            )
            own_warnings = [f"replicaset {name}: {warning}" for warning in own_warnings]
        setups.append(setup)
        warnings += own_warnings
        if name in found:
            warnings += _pin_warnings(setup, found[name].forward)
    if len(setups) > 1:
        check_sets({each.name: each.core for each in setups})
        further = keys_of_further([each.config for each in setups])
        recorded = dict(zip([each.name for each in setups[1:]], further, strict=True))
        setups[0] = structs.replace(setups[0], config=structs.replace(setups[0].config, replicasets=recorded))
    check_room_for_workers(list(configs.values()))
    engine = InferenceEngine(setups[0], system or real_system(), setups[1:])
    if all_sets:
        check_model_rules(config.models, engine.model_names, [*config.classes])
    return engine, warnings


class _SetParts(NamedTuple):
    """What is known of a replicaset before its memory is divided. weight_bytes: of all its replicas on processors,
    if they are planned here.
    """

    config: Config
    source: ModelSource
    gpus: list[Gpu]
    forward: ForwardChoice | None
    vocab_size: int
    types: dict[WeightKey, str]
    warnings: list[str]

    @property
    def weight_bytes(self) -> int:
        is_here = not self.gpus and plans_here(self.config)
        return weight_bytes_of(self.config, self.source.folder, self.types) if is_here else 0


def _find_parts(config: Config) -> _SetParts:
    """Check the options of a replicaset and find its model."""
    check_options_of_set(config)
    gpus, device_warnings = choose_device(config)
    choose_build(config.worker.cpu_kernels)
    check_kv_memory(config, gpus)
    _check_fake(config)
    source = find_model(config.model)
    forward, vocab_size = None, FakeTokenizer().vocab_size
    types: dict[WeightKey, str] = {}
    model_warnings: list[str] = []
    if source.folder is not None:
        decoder = read_served(source.folder, config.model.model_impl)
        vocab_size = decoder.vocab_size
        check_layout(decoder, layout_of(config))
        if gpus:
            check_runs_on_gpu(decoder)
        elif isinstance(decoder, TransformersModel):
            _check_for_transformers(config)
            dtype = resolve_dtype(decoder, config.model.dtype)
            forward = ForwardChoice(choose_operations(config.worker.cpu_kernels, dtype), "")
        else:
            quantization = config.model.quantization
            forward = choose_forward(
                config.worker.cpu_kernels,
                decoder,
                model=str(source.folder),
                dtype=resolve_dtype(decoder, config.model.dtype, quantization),
                block_size=config.cache.block_size,
                quantization=quantization,
            )
        # Wrong files are found here by their headers, in milliseconds, and not by a worker after seconds.
        if isinstance(decoder, TransformersModel):
            check_files(source.folder)
        else:
            model_warnings = _model_warnings(source.folder, decoder)
            files = find_weights(source.folder, decoder)
            if gpus:
                types = gpu_types(files, decoder)
                if config.gpu.torch_compile:
                    _check_for_torch_compile(decoder, types)
            elif forward is not None and forward.build:
                types = matrix_types(files, decoder, config.model.quantization)
    return _SetParts(config, source, list(gpus), forward, vocab_size, types, [*device_warnings, *model_warnings])


def _make_set(parts: _SetParts, tokenizer_folder: str, neighbours: Neighbours) -> tuple[EngineSetup, list[str]]:
    """The setup of a replicaset, with its share of the memory, and warnings."""
    source, gpus = parts.source, parts.gpus
    config, state_warnings = plan_states(parts.config, source.folder, parts.types, neighbours)
    plan = plan_cache(config, source.folder, gpus, parts.types, neighbours)
    memory: list[RankMemory] = []
    if source.folder is not None and not gpus and not plans_here(config):
        num_pools = num_kv_pools(config) + neighbours.num_pools
        memory = rank_memory(config, source.folder, parts.types, num_blocks=plan.num_blocks, num_pools=num_pools)
    setup = make_setup(
        config,
        model=str(source.folder) if source.folder else FAKE_MODEL,
        model_name=source.served_name,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        tokenizer=tokenizer_folder,
        vocab_size=parts.vocab_size,
        devices=[gpu.device for gpu in gpus],
        memory=memory,
    )
    return setup, [*parts.warnings, *state_warnings, *plan.warnings, *thread_warnings(config)]


def _model_warnings(folder: Path, model: ModelSpec) -> list[str]:
    """A warning if another file than config.json says how the weights are quantized."""
    method = model.quantized
    if method is None or method.source == CONFIG_FILE:
        return []
    return [f"{folder / method.source} says that the weights are quantized ({method.name}), and config.json does not"]


def _pin_warnings(setup: EngineSetup, forward: ForwardChoice | None) -> list[str]:
    """A warning if threads cannot be pinned."""
    if forward is None or not setup.config.worker.pin_threads:
        return []
    if not forward.build:
        return ["--pin-threads does nothing: it is for the compiled forward pass, and torch's operations are used"]
    first = worker_setups(setup)[0]
    if first.processors:
        return []
    num_threads = counted(setup.core.num_replicas * setup.layout.num_ranks * first.threads, "compute thread")
    return [f"--pin-threads does nothing: there are {num_threads}, and fewer processors to keep them on"]


def _check_fake(config: Config) -> None:
    """Raise UsageError for an option that has no effect on the fake model."""
    if config.model.model != FAKE_MODEL:
        return
    for option in map(options().__getitem__, _OF_WEIGHTS):
        if getattr(getattr(config, option.section), option.name) != option.default:
            raise UsageError(
                f"{option.flag} is for a model with weights, but --model is {FAKE_MODEL!r}; leave it out, or give "
                "another model"
            )


def _check_for_transformers(config: Config) -> None:
    """Raise UsageError for what only eventlm's own forward passes do."""
    for option in map(options().__getitem__, _OF_OUR_FORWARD_PASSES):
        if getattr(getattr(config, option.section), option.name) != option.default:
            raise UsageError(
                f"{option.flag} is for models that eventlm computes, and transformers computes this one; leave it out"
            )


def _check_for_torch_compile(model: ModelSpec, types: Mapping[WeightKey, str]) -> None:
    """Raise UsageError for a model of which torch compiles nothing. types: of matrices that stay codes."""
    reason = why_not_plain(model) or ("packed weights" if types else "")
    if reason:
        raise UsageError(
            "--torch-compile is for models like Llama and Qwen3 whose weights are not packed, and this "
            f"{model.architecture} has {reason}; leave it out"
        )


def _check_telemetry(config: Config) -> None:
    endpoint = config.telemetry.otlp_endpoint
    if endpoint and not config.record.folder:
        raise UsageError("--otlp-endpoint makes spans of the trace, and nothing is recorded; add --record DIR")
    if endpoint:
        traces_url(endpoint)
        headers_of(os.environ)


def _check_record(record: RecordConfig) -> None:
    if record.record_tokens and not record.folder:
        raise UsageError("--record-tokens writes a file beside the trace, and nothing is recorded; add --record DIR")
    keep_bytes = memory_bytes(record.record_keep)
    if record.folder and 0 < keep_bytes < memory_bytes(record.record_segment):
        raise UsageError(
            f"--record-keep {record.record_keep} is less than --record-segment {record.record_segment}, and the "
            "file that is being written is always kept; lower the segment too, or use --no-record"
        )
