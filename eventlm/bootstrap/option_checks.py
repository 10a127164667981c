"""What can be wrong with the options of an engine whatever its models are: found at a start before a model is fetched,
and where a configuration is only printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from eventlm.bootstrap.num_workers import check_num_ranks
from eventlm.config import Config, RecordConfig
from eventlm.config.backends import BackendSpec, parse_backend
from eventlm.config.load import replace_fields
from eventlm.config.options import options
from eventlm.config.replicasets import OF_OWN_WORKERS, check_served_names, configs_of_replicasets
from eventlm.core.predictor import Predictor
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import core_layout, resolve_plugins
from eventlm.errors import EventLMError, UsageError
from eventlm.models.config import check_quantization
from eventlm.worker.fake.tokens import FakeParameters


def check_options(config: Config) -> None:
    """Raise UsageError for options of a replicaset that contradict each other or name what there is not, and for two
    sets that requests could not tell apart.
    """
    sets = configs_of_replicasets(config)
    check_gateway_is_used(sets.values())
    for name, own in sets.items():
        with errors_of_set(name, is_alone=len(sets) == 1):
            check_options_of_set(own)
    # What backends serve is found by asking them.
    served = {name: own.model.served_model_name or own.model.model for name, own in sets.items()}
    check_served_names({name: [model] for name, model in served.items() if model})


def check_options_of_set(config: Config) -> None:
    """The same of one replicaset."""
    _check_gateway(config)
    _check_recovery(config.record)
    check_num_ranks(config)
    core_layout(config)
    resolve_launcher(config.parallel.launcher)
    _check_predictor(config.scheduler.predictor)
    replace_fields(FakeParameters(), config.model.fake, where="--fake")
    resolve_plugins(config.scheduler)
    check_quantization(config.model.dtype, config.model.quantization)


def check_gateway_is_used(sets: Iterable[Config]) -> None:
    """Raise UsageError for options of backends where no replicaset has any."""
    sets = list(sets)
    if any(own.gateway.backend for own in sets):
        return
    for option in options().values():
        if option.section == "gateway" and any(getattr(own.gateway, option.name) != option.default for own in sets):
            raise UsageError(f"{option.flag} is for backends, and there is none; give --backend too, or leave it out")


def _check_gateway(config: Config) -> None:
    """Raise UsageError for specs of backends that are wrong, and options of own workers beside them."""
    gateway = config.gateway
    if not gateway.backend:
        return
    for name in OF_OWN_WORKERS:
        option = options()[name]
        unset = "" if name == "model" else option.default
        if getattr(getattr(config, option.section), name) != unset:
            hint = "; a backend's model is found by asking, or given as URL,model=NAME" if name == "model" else ""
            raise UsageError(f"{option.flag} is for own workers, and --backend is given; leave it out{hint}")
    specs = [parse_backend(text) for text in gateway.backend]
    urls = [spec.url for spec in specs if isinstance(spec, BackendSpec)]
    for index, url in enumerate(urls):
        if url in urls[:index]:
            raise UsageError(f"--backend {url} is given twice; leave one out")
    if 0 < gateway.max_backends < len(specs):
        raise UsageError(f"--max-backends {gateway.max_backends} is less than the {len(specs)} that are given")


def _check_recovery(record: RecordConfig) -> None:
    """Raise UsageError for an engine that is to recover from a log that may lack events."""
    if not record.recover:
        return
    if not record.record:
        raise UsageError("--recover needs a trace, and --no-record is given; leave one out")
    if record.record_lag == "gap":
        raise UsageError("--recover needs a trace without gaps, and --record-lag gap is given; leave one out")


@contextlib.contextmanager
def errors_of_set(name: str, *, is_alone: bool) -> Iterator[None]:
    """Say in errors that pass through which replicaset they are about, where there are several."""
    try:
        yield
    except EventLMError as error:
        if not is_alone:
            error.args = (f"replicaset {name}: {error}",)
        raise


def _check_predictor(coefficients: list[int]) -> None:
    if not coefficients:
        return
    try:
        Predictor.from_coefficients(coefficients)
    except UsageError as error:
        raise UsageError(f"--predictor: {error}") from error
