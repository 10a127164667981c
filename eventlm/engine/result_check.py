"""Checks a worker's result against the launch that it answers, before anything of it reaches the log or a client.

A worker that answers something else has a defect. It counts as lost, and its sequences are recomputed elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import le

from eventlm.engine.request import Request
from eventlm.engine.request_check import TOKEN_ID_LIMIT
from eventlm.errors import EventLMError
from eventlm.events import Launched
from eventlm.sampling_params import TokenLogprobs
from eventlm.worker.protocol import RowExtras, StepResult

#: Times and durations in a result are below this many nanoseconds, about 146 years.
TIME_LIMIT_NS = 1 << 62
#: The most kinds of operation that a step can have, and the longest name of one.
MAX_OPS, MAX_OP_NAME = 256, 128
_FLOAT32_BYTES = 4


class ResultMismatchError(EventLMError):
    """A result does not answer the oldest launch of its worker. The message quotes nothing of a request."""


def wants_extras(request: Request) -> bool:
    """Whether the rows of a request give more than tokens."""
    params = request.sampling
    return request.scheduling.kind != "generate" or params.logprobs is not None or params.prompt_logprobs is not None


def check_result(
    result: StepResult, launched: Launched, asking: Sequence[tuple[int, Request]], *, vocab_size: int
) -> None:
    """Raise ResultMismatchError unless `result` answers `launched`.

    asking: (row, request) of each row that must give extras. Rows of sequences that take no more tokens are left out,
    because their extras are not used. vocab_size: 0 if unknown.
    """
    limit = vocab_size or TOKEN_ID_LIMIT
    for problem in chain(_problems(result, launched, limit), _extras_problems(result, launched, asking, limit)):
        raise ResultMismatchError(f"wrong result of step {launched.step}: {problem}")


def _problems(result: StepResult, launched: Launched, vocab_size: int) -> Iterator[str]:
    """What is wrong with the result apart from its extras. A step has a row for each sequence: written for speed."""
    if (result.epoch, result.step) != (launched.epoch, launched.step):
        yield f"it is of step {result.step} in epoch {result.epoch}, not of epoch {launched.epoch}"
    if not 0 <= result.start_ns <= result.end_ns < TIME_LIMIT_NS:
        yield f"it ran from {result.start_ns} to {result.end_ns} ns"
    most = launched.most or [1] * len(launched.decodes) + [chunk[4] for chunk in launched.chunks]
    counts = list(map(len, result.tokens))
    if len(counts) != len(most):
        yield f"it has {len(counts)} rows, and {len(most)} were launched"
    if counts != most and not all(map(le, counts, most)):
        yield f"its rows have {counts} tokens, and may have {most}"
    ids = list(chain.from_iterable(result.tokens))
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        yield f"it has a token id that is not from 0 to {vocab_size - 1}"
    ends = dict(result.ends)
    is_possible = all(0 <= row < len(most) and (most[row] or end == "error") for row, end in result.ends)
    if not is_possible or len(ends) < len(result.ends):
        yield f"it ends the rows {result.ends}, and of {len(most)} rows each can end once, by an error or if it samples"
    if len(result.ops) > MAX_OPS or any(len(name) > MAX_OP_NAME for name in result.ops):
        yield f"it names {len(result.ops)} operations, or one of them by more than {MAX_OP_NAME} characters"
    if any(not 0 <= time_ns < TIME_LIMIT_NS for time_ns in result.ops.values()):
        yield "an operation took less than 0 ns, or more than a century"


def _extras_problems(
    result: StepResult, launched: Launched, asking: Sequence[tuple[int, Request]], vocab_size: int
) -> Iterator[str]:
    if not result.extras and not asking:
        return
    rows = [extras.row for extras in result.extras]
    num_rows = len(launched.decodes) + len(launched.chunks)
    if any(not 0 <= row < num_rows for row in rows) or len(set(rows)) < len(rows):
        yield f"it has extras of the rows {rows}, and each of {num_rows} rows can have them once"
    by_row = {extras.row: extras for extras in result.extras}
    ends = dict(result.ends)
    for row, request in asking:
        num_tokens = len(result.tokens[row])
        # A row that is not finite has neither tokens nor extras.
        if ends.get(row) == "error" and not num_tokens and row not in by_row:
            continue
        extras = by_row.get(row, RowExtras(row=row))
        if problem := _logprobs_problem(extras.logprobs, num_tokens, request.sampling.num_listed_logprobs, vocab_size):
            yield f"the log-probabilities of row {row} {problem}"
        for problem in _prompt_problems(launched, extras, request, vocab_size):
            yield f"{problem} of row {row}"


def _prompt_problems(launched: Launched, extras: RowExtras, request: Request, vocab_size: int) -> Iterator[str]:
    """What is wrong with a row's extras for its prompt. Only chunks compute prompts."""
    prompt_tokens = len(request.prompt_token_ids)
    start = end = 0
    if extras.row >= len(launched.decodes):
        _, _, start, num_tokens, _ = launched.chunks[extras.row - len(launched.decodes)]
        end = start + num_tokens
    # Each token of a chunk predicts the next one.
    num_predicted = max(min(end + 1, prompt_tokens) - (start + 1), 0)
    num_top = request.sampling.prompt_logprobs
    if num_top is None and request.scheduling.kind == "score":
        num_top = 0
    problem = _logprobs_problem(extras.prompt_logprobs, num_predicted, num_top, vocab_size)
    if problem:
        yield f"the prompt's log-probabilities {problem}: those"
    elif extras.prompt_logprobs is not None and extras.prompt_start != start + 1:
        yield f"the prompt's log-probabilities start at token {extras.prompt_start}, not {start + 1}: those"
    num_bytes = len(extras.embedding)
    is_due = request.scheduling.kind == "pool" and end == prompt_tokens
    if bool(num_bytes) != is_due or num_bytes % _FLOAT32_BYTES:
        yield f"an embedding of {num_bytes} bytes, {'where one' if is_due else 'where none'} is due, is that"


def _logprobs_problem(logprobs: TokenLogprobs | None, num_tokens: int, num_top: int | None, vocab_size: int) -> str:
    """What is wrong with the log-probabilities of so many tokens; empty if nothing is.

    num_top: how many of the most likely tokens were asked for; below 0 all of them, None: no log-probabilities.
    """
    if num_top is None or not num_tokens:
        return "were not asked for" if logprobs is not None else ""
    if logprobs is None:
        return "are missing"
    lists = (logprobs.logprobs, logprobs.ranks, logprobs.top_ids, logprobs.top_logprobs)
    if any(len(each) != num_tokens for each in lists):
        return f"have {[len(each) for each in lists]} entries for {num_tokens} tokens"
    num_top = vocab_size if num_top < 0 else num_top
    for ids, values in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
        if len(ids) != len(values) or len(ids) > num_top:
            return f"list {len(ids)} tokens with {len(values)} values, and {num_top} were asked for"
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"list a token id that is not from 0 to {vocab_size - 1}"
    if not all(1 <= rank <= vocab_size for rank in logprobs.ranks):
        return f"have a rank that is not from 1 to {vocab_size}"
    return ""
