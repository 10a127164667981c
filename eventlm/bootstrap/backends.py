"""Asks the backends of a configuration what they are, before an engine is made of them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

from eventlm.bootstrap.backend_watch import addresses_of, list_backends, watch
from eventlm.bootstrap.model_source import find_tokenizer_folder
from eventlm.bootstrap.option_checks import check_options_of_set, errors_of_set
from eventlm.config import Config, ServerConfig
from eventlm.config.backends import BackendSpec, parse_backend
from eventlm.config.core import MAX_REPLICAS
from eventlm.config.replicasets import configs_of_replicasets
from eventlm.engine.backend import BackendError, BackendFacts, Connect, Watch
from eventlm.engine.backends.backend_set import MAX_ASKED_AT_ONCE
from eventlm.engine.backends.setup import FoundBackend, make_backends_setup
from eventlm.engine.setup import EngineSetup
from eventlm.errors import ExitCode, UsageError
from eventlm.system.disk import SYSTEM_DISK, Disk
from eventlm.tasks import gathered
from eventlm.worker.protocol import FAKE_MODEL

#: How long a backend may take for its answers at a start.
ASK_SECONDS = 5.0
#: Shown of the backends that are wrong.
_MAX_SHOWN = 8


class AskedSet(NamedTuple):
    """The backends of a replicaset, why some of them do not answer, and what tells which there are later."""

    found: list[FoundBackend]
    warnings: list[str]
    connect: Connect
    watches: list[Watch]


async def ask_backends(
    config: Config, connect: Connect, *, seconds: float = ASK_SECONDS, disk: Disk = SYSTEM_DISK
) -> dict[str, AskedSet]:
    """Ask all backends of all replicasets at the same time; returns the sets that have any, by name.

    seconds: how long each may take. disk: has the files that list them. Raises UsageError if the options of a set are
    wrong, if no backend of a set answers, or if one answers in a way that waiting does not change.
    """
    sets = configs_of_replicasets(config)
    with_backends = {name: own for name, own in sets.items() if own.gateway.backend}
    asked = await asyncio.gather(
        *(_ask_set(name, own, connect, seconds, disk, is_alone=len(sets) == 1) for name, own in with_backends.items())
    )
    return dict(zip(with_backends, asked, strict=True))


def backends_setup(config: Config, asked: AskedSet) -> EngineSetup:
    """The setup of a replicaset of backends. Raises UsageError for backends that do not belong together, a
    tokenizer that is not there and whatever `make_backends_setup` raises, CheckpointError and PullError.
    """
    answers = [(each.spec, each.facts) for each in asked.found if each.facts is not None]
    for spec, facts in answers:
        if 0 < facts.max_model_len < config.model.max_model_len:
            raise UsageError(
                f"--max-model-len {config.model.max_model_len}: {spec.url} takes contexts of up to "
                f"{facts.max_model_len} tokens; lower it"
            )
    models = _common_names(answers)
    if not models and not config.model.served_model_name:
        raise UsageError("no backend says what its model is called; give --served-model-name")
    tokenizer = config.gateway.tokenizer
    return make_backends_setup(
        config,
        asked.found,
        model_name=config.model.served_model_name,
        models=models,
        connect=asked.connect,
        watches=asked.watches,
        tokenizer=tokenizer and str(find_tokenizer_folder(tokenizer) or FAKE_MODEL),
    )


async def _ask_set(
    name: str, config: Config, connect: Connect, seconds: float, disk: Disk, *, is_alone: bool
) -> AskedSet:
    with errors_of_set(name, is_alone=is_alone):
        check_options_of_set(config)
        specs, watches = await _find_specs(config, disk)
        answers = await gathered(partial(_ask, connect, seconds), specs, at_once=MAX_ASKED_AT_ONCE)
        problems = [_problem(spec, answer) for spec, answer in zip(specs, answers, strict=True)]
        for problem, answer in zip(problems, answers, strict=True):
            if isinstance(answer, BackendError) and _is_lasting(answer):
                raise UsageError(problem)
        if all(problems):
            shown = "; ".join(problems[:_MAX_SHOWN])
            more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
            message = f"no backend answers: {shown}{more}" if problems else "--backend: there is no backend"
            # One may come up later.
            raise UsageError(message, exit_code=ExitCode.FAILED)
        found = [
            FoundBackend(spec, answer if isinstance(answer, BackendFacts) else None)
            for spec, answer in zip(specs, answers, strict=True)
        ]
        return AskedSet(found, [f"{problem}; it is tried again" for problem in problems if problem], connect, watches)


async def _find_specs(config: Config, disk: Disk) -> tuple[list[BackendSpec], list[Watch]]:
    """The backends that the specs of a set stand for now, each once, and watches of those that may change."""
    found: dict[str, BackendSpec] = {}
    watches: list[Watch] = []
    for source in map(parse_backend, config.gateway.backend):
        if isinstance(source, BackendSpec):
            specs = [source]
        else:
            specs = await list_backends(source, disk)
            watches.append(partial(watch, source, specs, seconds=config.gateway.probe_interval_ms / 1000, disk=disk))
        for spec in specs:
            if await _is_own_address(spec.url, config.server):
                raise UsageError(f"--backend {spec.url} is the address of this server itself; leave it out")
            found.setdefault(spec.url, spec)
    limit = config.gateway.max_backends or MAX_REPLICAS
    if len(found) > limit:
        raise UsageError(f"--backend: there are {len(found):,} backends, and there may be {limit:,} (--max-backends)")
    return list(found.values()), watches


async def _ask(connect: Connect, seconds: float, spec: BackendSpec) -> BackendFacts | BackendError:
    client = connect(spec)
    try:
        async with asyncio.timeout(seconds):
            return await client.ask()
    except TimeoutError:
        return BackendError(f"{spec.url} did not answer within {seconds:g} s", "timeout")
    except BackendError as error:
        return error
    finally:
        await client.close()


def _problem(spec: BackendSpec, answer: BackendFacts | BackendError) -> str:
    """Empty if there is none."""
    if isinstance(answer, BackendFacts):
        return ""
    text = str(answer).rstrip(".")
    return text if spec.url in text else f"{spec.url}: {text}"


def _is_lasting(error: BackendError) -> bool:
    """Whether an operator has to change something: a key, a certificate, or what is asked."""
    return (
        error.status in (401, 403)
        or error.kind in ("refused", "protocol")
        or isinstance(error.__cause__, ssl.SSLError | ssl.CertificateError)
    )


def _common_names(answers: Sequence[tuple[BackendSpec, BackendFacts]]) -> list[str]:
    """What all of them call the model, or each, if each was given a name; empty if none says. Raises UsageError if they
    have no name in common.
    """
    if all(spec.model for spec, _ in answers):
        return list(dict.fromkeys(spec.model for spec, _ in answers))
    names: Mapping[str, list[str]] = {
        spec.url: [spec.model] if spec.model else facts.models for spec, facts in answers if spec.model or facts.models
    }
    if not names:
        return []
    first, *others = names.items()
    common = first[1]
    for url, own in others:
        if not set(common) & set(own):
            raise UsageError(
                f"{first[0]} serves {', '.join(common)} and {url} {', '.join(own)}, and requests go by one name: if "
                "they are one model, put model=NAME after each URL, else make them two replicasets"
            )
        common = [name for name in common if name in own]
    return common


async def _is_own_address(url: str, server: ServerConfig) -> bool:
    """Whether this server will listen there."""
    parts = urlsplit(url)
    if server.port != (parts.port or {"http": 80, "https": 443}[parts.scheme]):
        return False
    addresses = await addresses_of(parts.hostname or "")
    if server.host in ("", "0.0.0.0", "::"):
        return any(map(_is_of_this_host, addresses))
    return bool(set(addresses) & set(await addresses_of(server.host)))


def _is_of_this_host(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
