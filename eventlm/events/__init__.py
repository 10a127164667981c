"""The vocabulary of the log: facts, decisions and markers, and their codec."""

from __future__ import annotations

from eventlm.events.base import Decision, Event, Fact, Marker
from eventlm.events.decisions import (
    Admitted,
    Closing,
    Emitted,
    Finished,
    Launched,
    PluginFailed,
    Preempted,
    Rejected,
    Routed,
    TimerSet,
)
from eventlm.events.facts import (
    Arrived,
    CacheFlushed,
    Cancelled,
    Desynced,
    FrontEndLost,
    GrammarReady,
    Paused,
    PolicySwapped,
    PredictorSwapped,
    Resumed,
    StepCompleted,
    TextEnded,
    TimerDue,
    WorkerLost,
    WorkerUp,
)
from eventlm.events.markers import (
    Checkpoint,
    End,
    Gap,
    Header,
    PluginRecord,
    ReplicasetRecord,
    Snapshot,
    StepOps,
    UserMark,
)

FACTS: tuple[type[Fact], ...] = tuple(Fact.__subclasses__())
DECISIONS: tuple[type[Decision], ...] = tuple(Decision.__subclasses__())
MARKERS: tuple[type[Marker], ...] = tuple(Marker.__subclasses__())

__all__ = [
    "DECISIONS",
    "FACTS",
    "MARKERS",
    "Admitted",
    "Arrived",
    "CacheFlushed",
    "Cancelled",
    "Checkpoint",
    "Closing",
    "Decision",
    "Desynced",
    "Emitted",
    "End",
    "Event",
    "Fact",
    "Finished",
    "FrontEndLost",
    "Gap",
    "GrammarReady",
    "Header",
    "Launched",
    "Marker",
    "Paused",
    "PluginFailed",
    "PluginRecord",
    "PolicySwapped",
    "PredictorSwapped",
    "Preempted",
    "Rejected",
    "ReplicasetRecord",
    "Resumed",
    "Routed",
    "Snapshot",
    "StepCompleted",
    "StepOps",
    "TextEnded",
    "TimerDue",
    "TimerSet",
    "UserMark",
    "WorkerLost",
    "WorkerUp",
]
