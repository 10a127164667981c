"""The configuration of an engine and its server: structs here, TOML and flags in `eventlm.config.load`."""

from __future__ import annotations

from eventlm.config.core import CoreConfig
from eventlm.config.structs import (
    CacheConfig,
    Config,
    GpuConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    PluginSpec,
    RecordConfig,
    SchedulerConfig,
    ServerConfig,
    ServiceClass,
    TelemetryConfig,
    WorkerConfig,
)

__all__ = [
    "CacheConfig",
    "Config",
    "CoreConfig",
    "GpuConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "PluginSpec",
    "RecordConfig",
    "SchedulerConfig",
    "ServerConfig",
    "ServiceClass",
    "TelemetryConfig",
    "WorkerConfig",
]
