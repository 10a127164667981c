"""The configuration of an engine and its server: structs here, TOML and flags in `eventlm.config.load`."""

from __future__ import annotations

from eventlm.config.classes import ServiceClass
from eventlm.config.core import CoreConfig
from eventlm.config.gpu import GpuConfig
from eventlm.config.server import ServerConfig
from eventlm.config.structs import (
    CacheConfig,
    Config,
    LogConfig,
    ModelConfig,
    PluginSpec,
    RecordConfig,
    SchedulerConfig,
    WorkerConfig,
)

__all__ = [
    "CacheConfig",
    "Config",
    "CoreConfig",
    "GpuConfig",
    "LogConfig",
    "ModelConfig",
    "PluginSpec",
    "RecordConfig",
    "SchedulerConfig",
    "ServerConfig",
    "ServiceClass",
    "WorkerConfig",
]
