"""Errors that a user can cause or must act on: a message that says what, where and what to do, and an exit code.

2: what was given (a flag, a variable, a file of settings, and the folder, file or address that they name) cannot be
used, and another must be given. 1: what was given is right, and something failed or is damaged. Others have their own.
"""

from __future__ import annotations


class EventLMError(Exception):
    """Base of all errors that are shown to a user as one line, without a traceback."""

    exit_code = 1


class UsageError(EventLMError):
    """A flag, a config key or a combination of them makes no sense."""

    exit_code = 2


class CheckpointError(EventLMError):
    """A model folder is broken or of an architecture that is not supported."""


class NoCheckpointError(CheckpointError):
    """What was given as a model is no checkpoint's folder."""

    exit_code = UsageError.exit_code


class PullError(EventLMError):
    """A model could not be fetched or converted."""


class TraceCorruptError(EventLMError):
    """A complete line of a trace fails its hash, or a line is missing or out of order."""

    exit_code = 3


class TornTraceError(EventLMError):
    """The last line of a trace is incomplete and the caller asked for a whole one."""

    exit_code = 4


class TraceVersionError(EventLMError):
    """The trace was written by a version whose format or behaviour this code does not have."""

    exit_code = 13


class InvariantError(EventLMError):
    """The state of the core broke one of its own rules: a defect of eventlm, never of its input."""

    exit_code = 11


class LivenessError(InvariantError):
    """Something waits although nothing is under way that could ever wake it."""

    exit_code = 12
