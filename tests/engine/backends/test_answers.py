"""What has been shown of answers, and the facts that it makes."""

from __future__ import annotations

from eventlm.engine.backend import AnswerDelta, AnswerEnd, AnswerUsage, AttemptId, BackendError
from eventlm.engine.backends.answers import Answers
from eventlm.engine.request import FinishedOutput
from eventlm.events import Forwarded, Relayed
from eventlm.types import SequenceId
from tests.engine.backends.engines import forwarded_request
from tests.engine.engines import request

NAME = AttemptId(3, 0, 1)


def begun(attempt: int = 1, answers: Answers | None = None) -> Answers:
    if answers is None:
        answers = Answers()
        answers.add(3, forwarded_request(n=2, seed=2**63 - 1))
    answers.begin(Forwarded(request=3, index=0, replica=0, attempt=attempt, running=1, limit=1))
    return answers


def relayed(answers: Answers, *deltas: AnswerDelta, name: AttemptId = NAME) -> list[tuple[int, str]]:
    answers.stream({name: list(deltas)})
    return [(output.start, output.delta.text) for _, output in answers.relay(Relayed(num_tokens=1))]


def test_requests_of_own_workers_have_none() -> None:
    answers = Answers()
    answers.add(3, request())
    output = FinishedOutput(0, "stop", 1, 0)
    assert answers.finish(SequenceId(3, 0), output) is output


def test_seeds_follow_each_other_and_fit_into_what_servers_take() -> None:
    answers = begun()
    second = answers.begin(Forwarded(request=3, index=1, replica=0, attempt=1, running=1, limit=1))
    assert second.seed == 0


def test_what_is_shown_counts_one_token_at_least() -> None:
    answers = begun()
    assert answers.stream({NAME: [AnswerDelta("", 0)]}).rows == [(3, 0, 1, 1)]
    assert answers.relay(Relayed(num_tokens=1))
    assert answers.stream({NAME: [AnswerDelta("a", 1), AnswerDelta("bc", 2)]}).rows == [(3, 0, 1, 4)]
    assert [output.start for _, output in answers.relay(Relayed(num_tokens=3))] == [1, 2]


def test_dropped_rows_and_sequences_that_are_over_are_not_shown() -> None:
    answers = begun()
    answers.stream(
        {
            NAME: [AnswerDelta("a", 1)],
            AttemptId(3, 1, 1): [AnswerDelta("b", 1)],
            AttemptId(9, 0, 1): [AnswerDelta("c", 1)],
        }
    )
    assert [output.delta.text for _, output in answers.relay(Relayed(num_tokens=1, dropped=[0]))] == ["b"]
    assert answers.relay(Relayed(num_tokens=1)) == []


def test_a_second_attempt_counts_on() -> None:
    answers = begun()
    assert relayed(answers, AnswerDelta("a", 1), AnswerDelta("b", 1)) == [(0, "a"), (1, "b")]
    failed = answers.fail(NAME, BackendError("x", "broken", status=500, retry_after_ns=7), can_continue=True)
    assert (failed.kind, failed.status, failed.retry_after_ns, failed.can_continue) == ("broken", 500, 7, True)
    begun(2, answers)
    ended = answers.end(AttemptId(3, 0, 2), AnswerEnd("length", AnswerUsage(9, 3, 4)))
    assert (ended.num_tokens, ended.prompt_tokens, ended.cached_tokens, ended.reason) == (5, 7, 4, "length")


def test_what_a_second_attempt_was_given_of_the_answer_counts_as_output() -> None:
    answers = begun()
    relayed(answers, AnswerDelta("abcd", 4))
    begun(2, answers)
    ended = answers.end(AttemptId(3, 0, 2), AnswerEnd("length", AnswerUsage(prompt=14, completion=6, cached=12)))
    assert (ended.num_tokens, ended.prompt_tokens, ended.cached_tokens) == (10, 10, 10)
    output = answers.finish(SequenceId(3, 0), FinishedOutput(0, "length", 10, 0))
    assert output.usage == AnswerUsage(prompt=10, completion=10, cached=10)


def test_only_plain_text_can_be_continued() -> None:
    for delta in (
        AnswerDelta("", 1, "thought"),
        AnswerDelta("", 1, "", [(0, "f", "{}")]),
        AnswerDelta("a", 1, logprobs=b"[]"),
    ):  # type: ignore[list-item]
        answers = begun()
        answer = answers.begin(Forwarded(request=3, index=0, replica=0, attempt=1, running=1, limit=1))
        relayed(answers, AnswerDelta("a", 1))
        assert answer.is_plain
        relayed(answers, delta)
        assert not answer.is_plain


def test_token_ids_are_kept_while_all_are_known() -> None:
    answers = begun()
    answer = answers.begin(Forwarded(request=3, index=0, replica=0, attempt=1, running=1, limit=1))
    relayed(answers, AnswerDelta("a", 1, token_ids=[7]))
    assert answer.token_ids == [7]
    relayed(answers, AnswerDelta("b", 1))
    assert answer.token_ids is None


def test_the_last_output_has_what_the_server_said() -> None:
    answers = begun()
    answers.end(NAME, AnswerEnd("stop", AnswerUsage(1, 2, 3), stop_reason="END"))
    output = answers.finish(SequenceId(3, 0), FinishedOutput(0, "stop", 2, 3))
    assert (output.usage, output.stop_reason, output.failure) == (AnswerUsage(1, 2, 3), "END", None)
    error = BackendError("no", "refused", status=400)
    answers.fail(AttemptId(3, 1, 1), error, can_continue=False)
    output = answers.finish(SequenceId(3, 1), FinishedOutput(1, "error", 0, 0))
    assert (output.usage, output.failure) == (None, error.failure)
