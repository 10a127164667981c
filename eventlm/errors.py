"""Exit codes, and errors that a user can cause or must act on: one line that says what, where and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum


class ExitCode(IntEnum):
    """All exit codes of `eventlm`, and what each means.

    2 or 1: a start that fails with 2 fails again until a flag or a file changes, so a service manager must
    not restart it (`RestartPreventExitStatus=2`). What fails with 1 may pass later: a network, a full disk, a crash.
    """

    meaning: str

    OK = 0, "done"
    FAILED = 1, "failed, and may succeed another time"
    USAGE = 2, "usage: a flag, file, folder or address that cannot be used"
    DAMAGED = 3, "the trace is damaged"
    TORN = 4, "its last line is torn (with --strict)"
    DIFFERENT = 10, "different decisions or tokens"
    INVARIANT = 11, "the core broke an invariant"
    LIVENESS = 12, "a sequence waits for nothing"
    VERSION = 13, "written by another version"
    GAP = 14, "events were not recorded"
    INTERRUPTED = 130, "interrupted by Ctrl-C"
    BROKEN_PIPE = 141, "the reader of the output is gone"
    TERMINATED = 143, "ended by SIGTERM"

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """A member with its meaning."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class EventLMError(Exception):
    """Base of all errors that are shown to a user as one line, without a traceback.

    exit_code: of this error, where it is not that of its class.
    """

    exit_code: int = ExitCode.FAILED

    def __init__(self, *words: object, exit_code: int | None = None) -> None:
        super().__init__(*words)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageError(EventLMError):
    """A flag, a config key or a combination of them makes no sense."""

    exit_code = ExitCode.USAGE


class TooLittleMemoryError(UsageError):
    """The memory that is free now is too little for what is asked for."""


class InputError(UsageError, ValueError):
    """A value in a request is wrong. It is a ValueError too, as callers of Python libraries expect.

    `param` is its path in the request, such as `messages[1].role`; None stands for the request as a whole. The message
    is a sentence. `code` is the one that OpenAI's API has for this kind of mistake.
    """

    code: str | None = "invalid_value"

    def __init__(self, param: str | None, message: str) -> None:
        # Both, so that another process can raise it again from its arguments.
        super().__init__(param, message)
        self.param = param
        self._message = message

    def __str__(self) -> str:
        return self._message

    def renamed(self, rename: Callable[[str], str]) -> InputError:
        """The same error, of the same type, for a caller whose fields have other names.

        rename: the caller's path of a field from its path here. `param` and all paths that the message quotes change.
        """
        param = self.param and rename(self.param)
        message = re.sub(r"'([^'\s]+)'", lambda found: f"'{rename(found[1])}'", self._message)
        if self.param:
            own = re.escape(self.param)
            message = re.sub(rf"(?<=: ){own}(?= )|(?<=\bthe ){own}(?!\.?[\w\[])", lambda _: f"{param}", message)
        error = type(self).__new__(type(self))
        error.__dict__.update(self.__dict__)
        error.args = (param, message)
        error.param, error._message = param, message
        return error


class InvalidTypeError(InputError):
    """A field has the wrong type."""

    code = "invalid_type"


class MissingParameterError(InputError):
    """A required field is absent."""

    code = "missing_required_parameter"

    def __init__(self, param: str) -> None:
        super().__init__(param, f"Missing required parameter: '{param}'.")


class UnknownParameterError(InputError):
    """An object that takes no other fields has this one."""

    code = "unknown_parameter"


class InvalidJsonError(InputError):
    """The request is not JSON."""

    code = None

    def __init__(self, detail: str) -> None:
        super().__init__(None, f"The request body is not valid JSON: {detail}")


class UnknownModelError(InputError):
    """No such model is served."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__("model", f"The model '{model}' does not exist; GET /v1/models lists those that do.")


class PromptTooLongError(InputError):
    """The prompt and the tokens to generate exceed the model's context.

    num_tokens, most_tokens: what the prompt has, and what it may have; 0 where that is not known.
    """

    code = "context_length_exceeded"

    def __init__(self, param: str | None, message: str, num_tokens: int = 0, most_tokens: int = 0) -> None:
        super().__init__(param, message)
        self.num_tokens = num_tokens
        self.most_tokens = most_tokens


class NoChatTemplateError(InputError):
    """The model takes texts, not conversations."""

    code = "no_chat_template"


class CheckpointError(EventLMError):
    """A model folder is missing, broken or of an architecture that is not supported."""

    exit_code = ExitCode.USAGE


class PullError(EventLMError):
    """A model could not be fetched or converted."""


class TraceCorruptError(EventLMError):
    """A complete line of a trace fails its hash, or a line is missing or out of order."""

    exit_code = ExitCode.DAMAGED


class TornTraceError(EventLMError):
    """The last line of a trace is incomplete and the caller asked for a whole one."""

    exit_code = ExitCode.TORN


class TraceVersionError(EventLMError):
    """The trace was written by a version whose format or behaviour this code does not have."""

    exit_code = ExitCode.VERSION


class InvariantError(EventLMError):
    """The state of the core broke one of its own rules: a defect of eventlm, never of its input."""

    exit_code = ExitCode.INVARIANT


class LivenessError(InvariantError):
    """Something waits although nothing is under way that could ever wake it."""

    exit_code = ExitCode.LIVENESS
