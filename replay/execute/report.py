"""The result of a re-execution as text and as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from eventlm.formatting import counted
from eventlm.replay.execute.execution import ExecuteResult
from eventlm.replay.verify.divergence import Code

#: Mismatches that are listed; JSON has all.
MAX_SHOWN = 10


def render(result: ExecuteResult) -> str:
    """The summary, or the mismatches; without a final newline."""
    lines = _mismatch_lines(result) if result.mismatches else [_summary(result)]
    if result.num_steps_by_digest:
        lines.append(
            f"{counted(result.num_steps_by_digest, 'step')} compared by digest: their tokens in the token log are "
            "missing or damaged"
        )
    if result.num_missing:
        lines.append(
            f"gap: {counted(result.num_missing, 'event')} not recorded; everything before was re-executed, the rest "
            "cannot be, because the KV cache is unknown there"
        )
    if result.damage:
        lines.append(f"the rest cannot be re-executed: {result.damage}")
    if result.host_differences:
        outcome = "this may explain the differences" if result.mismatches else "results may differ there"
        lines.append(f"host, software or threads are not those of the recorded run; {outcome}:")
        lines += [f"  {difference}" for difference in result.host_differences]
    return "\n".join(lines)


def render_json(result: ExecuteResult) -> str:
    """One JSON object: the result's fields with all mismatches, `exit_code`, and that tokens were checked."""
    fields: dict[str, Any] = msgspec.to_builtins(result)
    more = {"num_mismatches": len(result.mismatches), "exit_code": result.exit_code, "tokens_checked": True}
    return msgspec.json.encode(fields | more).decode()


def _summary(result: ExecuteResult) -> str:
    if not result.num_steps:
        return "nothing re-executed: no step has completed" + (" before the damage" if result.damage else "")
    work = f"{counted(result.num_tokens, 'token')} in {counted(result.num_steps, 'step')} re-executed"
    forced = ", each step from the recorded tokens" if result.is_teacher_forced else ""
    return f"{work}{forced}, identical ({counted(result.num_requests, 'request')})"


def _mismatch_lines(result: ExecuteResult) -> list[str]:
    kind, first = Code.TOKEN.value, result.mismatches[0]
    lines = [f"{result.path}: {first.code} at {first.describe()}"]
    same = f"{counted(result.num_tokens, 'token')} in {counted(result.num_steps, 'step')}"
    if result.is_teacher_forced:
        lines.append(
            f"tokens, counts, ends or blocks that differ: {len(result.mismatches):,}; {same} came out as recorded"
        )
        lines += [f"  {mismatch.describe()}" for mismatch in result.mismatches[:MAX_SHOWN]]
        left = len(result.mismatches) - MAX_SHOWN
        lines += [f"  and {left:,} more; --json has all"] if left > 0 else []
    else:
        lines.append(f"{same} before it came out as recorded")
    return [*lines, f"cause     {kind.cause}", f"remedy    {kind.remedy}"]
