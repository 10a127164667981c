"""The composition root: from a configuration to an engine and what its edges need."""

from __future__ import annotations

from typing import NamedTuple

from eventlm.compose.cache_plan import plan_cache
from eventlm.compose.model_source import find_model
from eventlm.compose.text_parts import load_text
from eventlm.config import Config, RecordConfig
from eventlm.config.load import replace_fields
from eventlm.config.sizes import memory_bytes
from eventlm.control.engine import InferenceEngine
from eventlm.control.setup import make_setup, resolve_plugins
from eventlm.core.predictor import Predictor
from eventlm.errors import UsageError
from eventlm.models.config import read_config
from eventlm.models.cpu_kernels import choose_build
from eventlm.models.safetensors_header import find_shards, read_header
from eventlm.server.fake_tokenizer import FakeTokenizer
from eventlm.server.generation_config import GenerationDefaults
from eventlm.server.tokenizer import Tokenizer
from eventlm.worker.fake import FakeParameters
from eventlm.worker.protocol import FAKE_MODEL


class Composition(NamedTuple):
    """An engine that has not been started, its tokenizer, and what a request gets that does not say otherwise.

    `vocab_size` and `embedding_size` (of a pooled prompt) are the model's; `warnings` are for the user.
    """

    engine: InferenceEngine
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    vocab_size: int
    embedding_size: int
    warnings: list[str]


def compose(config: Config) -> Composition:
    """Find the model, size the cache, resolve the plug-ins. Everything that can be wrong is found before a start.

    Raises UsageError, CheckpointError or PullError.
    """
    _check_predictor(config.scheduler.predictor)
    replace_fields(FakeParameters(), config.model.fake, where="--fake")
    _check_record(config.record)
    # Twice, for the setup does it too: a model may have to be fetched, and that must not be in vain.
    resolve_plugins(config.scheduler)
    choose_build(config.worker.cpu_kernels)
    source = find_model(config.model)
    plan = plan_cache(config, source.folder)
    setup = make_setup(
        config,
        model=str(source.folder) if source.folder else FAKE_MODEL,
        model_name=source.served_name,
        num_blocks=plan.num_blocks,
        max_model_len=plan.max_model_len,
        vocab_size=read_config(source.folder).vocab_size if source.folder else FakeTokenizer().vocab_size,
    )
    engine = InferenceEngine(setup)
    # A download that was cut short is found in milliseconds, before any worker loads torch.
    for shard in find_shards(source.folder) if source.folder else []:
        read_header(shard)
    text = load_text(setup.model)
    return Composition(engine, text.tokenizer, text.defaults, setup.vocab_size, text.embedding_size, plan.warnings)


def _check_predictor(coefficients: list[int]) -> None:
    if not coefficients:
        return
    try:
        Predictor.from_coefficients(coefficients)
    except UsageError as error:
        raise UsageError(f"--predictor: {error}") from error


def _check_record(record: RecordConfig) -> None:
    if record.record_tokens and not record.folder:
        raise UsageError("--record-tokens writes a file beside the trace, and nothing is recorded; add --record DIR")
    keep_bytes = memory_bytes(record.record_keep)
    if record.folder and 0 < keep_bytes < memory_bytes(record.record_segment):
        raise UsageError(
            f"--record-keep {record.record_keep} is less than --record-segment {record.record_segment}, and the "
            "file that is being written is always kept; lower the segment too, or use --no-record"
        )
