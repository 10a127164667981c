"""The setup of a replicaset of backends, from what they said when they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from eventlm.config import Config, CoreConfig
from eventlm.config.backends import BackendSpec
from eventlm.config.core import Forwarding, most_blocks
from eventlm.engine.backend import BackendFacts, Connect, Watch, described
from eventlm.engine.plugins.launchers import resolve_launcher
from eventlm.engine.setup import EngineSetup, resolve_plugins
from eventlm.types import ceil_div

#: Slots for backends that are added at run time, unless the configuration says how many there may be.
SPARE_SLOTS = 16
#: The longest context where no backend says how long one may be.
UNKNOWN_MODEL_LEN = 1 << 20


class FoundBackend(NamedTuple):
    """A backend at the start. facts: None: it does not answer."""

    spec: BackendSpec
    facts: BackendFacts | None

    def described(self) -> dict[str, Any]:
        """What a header and the log say of it. There is no key in it."""
        return {"url": self.spec.url} | (described(self.spec, self.facts) if self.facts is not None else {})


def make_backends_setup(
    config: Config,
    found: Sequence[FoundBackend],
    *,
    model_name: str = "",
    models: Sequence[str] = (),
    connect: Connect,
    watches: Sequence[Watch] = (),
    tokenizer: str = "",
    vocab_size: int = 0,
) -> EngineSetup:
    """Resolve the plug-ins and derive the core's limits. Raises UsageError as `resolve_plugins` does.

    model_name: that requests use; empty: the first of `models`, which are what the backends call it. tokenizer: the
    folder of the one that counts prompts, or empty.
    """
    plugins = resolve_plugins(config.scheduler)
    return EngineSetup(
        config=config,
        core=_core(config, found, model_name or models[0]),
        model="",
        tokenizer=tokenizer,
        policy=plugins.policy,
        batcher=plugins.batcher,
        router=plugins.router,
        extra_policies=plugins.extra_policies,
        vocab_size=vocab_size,
        launcher=resolve_launcher(config.parallel.launcher),
        backends=[each.spec for each in found],
        connect=connect,
        watches=list(watches),
        backend_models=list(models),
        backends_host={"device": "backends", "backends": [each.described() for each in found]},
    )


def _core(config: Config, found: Sequence[FoundBackend], model_name: str) -> CoreConfig:
    gateway, scheduler, block_size = config.gateway, config.scheduler, config.cache.block_size
    answers = [each.facts for each in found if each.facts is not None]
    num_replicas = max(gateway.max_backends or len(found) + SPARE_SLOTS, len(found))
    lengths = [facts.max_model_len for facts in answers if facts.max_model_len]
    longest = min([*lengths, *filter(None, [config.model.max_model_len])], default=UNKNOWN_MODEL_LEN)
    cache_tokens = min(
        (facts.cache_tokens for facts in answers if facts.cache_tokens), default=gateway.backend_cache_tokens
    )
    if lengths:
        cache_tokens = max(cache_tokens, longest)
    # One block is never given away.
    num_blocks = min(ceil_div(cache_tokens, block_size) + 1, most_blocks(num_replicas))
    limits = [each.spec.max_concurrency for each in found] + [facts.max_concurrency for facts in answers]
    return CoreConfig(
        models=[model_name],
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min(longest, (num_blocks - 1) * block_size),
        num_replicas=num_replicas,
        max_num_seqs=max([scheduler.max_num_seqs, *limits]),
        max_queue_len=scheduler.max_queue_len,
        max_skips=scheduler.max_skips,
        max_evictions=scheduler.max_evictions,
        forwards=Forwarding(
            max_attempts=1 + gateway.forward_retries,
            backoff_ns=gateway.retry_backoff_ms * 1_000_000,
            retry_share_ppm=gateway.retry_budget_percent * 10_000,
            hedge_ns=gateway.hedge_ms * 1_000_000,
        ),
    )
