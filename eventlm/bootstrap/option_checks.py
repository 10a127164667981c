"""What can be wrong with the options of an engine whatever its models are: found at a start before a model is fetched,
and where a configuration is only printed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from eventlm.bootstrap.num_workers import check_num_ranks
from eventlm.config import Config
from eventlm.config.load import replace_fields
from eventlm.config.replicasets import check_served_names, configs_of_replicasets
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
    for name, own in sets.items():
        with errors_of_set(name, is_alone=len(sets) == 1):
            check_options_of_set(own)
    check_served_names({name: [own.model.served_model_name or own.model.model] for name, own in sets.items()})


def check_options_of_set(config: Config) -> None:
    """The same of one replicaset."""
    check_num_ranks(config)
    core_layout(config)
    resolve_launcher(config.parallel.launcher)
    _check_predictor(config.scheduler.predictor)
    replace_fields(FakeParameters(), config.model.fake, where="--fake")
    resolve_plugins(config.scheduler)
    check_quantization(config.model.dtype, config.model.quantization)


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
