"""The result of a verification as text and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.formatting import counted
from eventlm.replay.verify.divergence import Divergence, shortened
from eventlm.replay.verify.verifier import VerifyResult

#: Longer events are shortened.
MAX_EVENT_CHARS = 2000
_LABEL_CHARS = 9


def render(result: VerifyResult) -> str:
    """The summary of a clean verification, or the first difference; without a final newline."""
    if result.divergence is None:
        return _summary(result)
    return "\n".join(_divergence_lines(result, result.divergence))


def render_json(result: VerifyResult) -> str:
    """One JSON object: the result's fields, `exit_code`, and that tokens were not checked."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    return msgspec.json.encode(fields | {"exit_code": result.exit_code, "tokens_checked": False}).decode()


def _summary(result: VerifyResult) -> str:
    counts = f"{counted(result.num_events, 'event')}, {counted(result.num_decisions, 'decision')} verified, "
    if result.change:
        return f"{counts}tokens not checked: with {result.change} all decisions would have been the same"
    parts = [counted(result.num_checkpoints, "checkpoint")]
    parts += [counted(result.num_segments, "segment")] if result.num_segments > 1 else []
    parts += [f"from event {result.first_s:,} on, earlier ones are not in it"] if result.first_s else []
    text = f"{counts}tokens not checked ({', '.join(parts)})"
    if result.num_missing:
        text += f"\ngap: {counted(result.num_missing, 'event')} not recorded; everything before and after is verified"
    return text


def _divergence_lines(result: VerifyResult, found: Divergence) -> list[str]:
    before = counted(result.num_decisions, "decision")
    checkpoints = "" if result.change else f" and {counted(result.num_checkpoints, 'checkpoint')}"
    lines = [
        f"{found.path or result.path}: {found.code} at event {found.s} (line {found.line}): {found.what}",
        f"{before}{checkpoints} before it came out as recorded",
        *([f"with {result.change}"] if result.change else []),
        "",
    ]
    lines += _block("recorded", [_event(found.recorded)])
    lines += _block("replayed", [_event(found.replayed)])
    lines += _block("differs", found.fields)
    lines += _section("what led to it, newest first", found.chain)
    lines += _section("state of the replay", found.state)
    lines.append("")
    lines += _block("cause", [found.cause])
    lines += _block("remedy", [found.remedy])
    return lines


def _event(event: dict[str, Any] | None) -> str:
    if event is None:
        return "nothing"
    return shortened(msgspec.json.encode(event).decode(), MAX_EVENT_CHARS)


def _block(label: str, texts: list[str]) -> list[str]:
    """The texts under each other, with a label before the first."""
    return [f"{'' if index else label:<{_LABEL_CHARS}} {text}" for index, text in enumerate(texts)]


def _section(title: str, texts: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {text}" for text in texts)] if texts else []
