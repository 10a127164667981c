"""Who waits for which grammar, and what ends the waiting."""

from __future__ import annotations

from collections.abc import Callable

from eventlm.engine.replicas.grammar_builds import GRAMMAR_SECONDS, MAX_LOSSES, GrammarBuilds
from eventlm.worker.protocol import GrammarBuilt, PrepareGrammar


class Board:
    """Grammar builds with what they sent and said."""

    def __init__(self, *up: int) -> None:
        self.sent: list[tuple[int, str]] = []
        self.keys: dict[str, int] = {}
        self.ready: list[tuple[int, str]] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.builds = GrammarBuilds(
            self._send,
            lambda request, error: self.ready.append((request, str(error or ""))),
            lambda seconds, action: self.timers.append((seconds, action)),
        )
        for replica in up:
            self.builds.worker_up(replica)

    def _send(self, replica: int, message: PrepareGrammar) -> None:
        self.sent.append((replica, message.grammar))
        self.keys[message.grammar] = message.key

    def pass_time(self) -> None:
        """All timers that there are go off."""
        timers, self.timers = self.timers, []
        for seconds, action in timers:
            assert seconds == GRAMMAR_SECONDS
            action()

    def answer(self, replica: int, grammar: str, error: str = "") -> None:
        self.builds.built(replica, GrammarBuilt(epoch=1, key=self.keys[grammar], error=error))


def test_a_request_waits_for_all_workers_that_are_up() -> None:
    board = Board(0, 1)
    board.builds.want(7, "g")
    assert board.sent == [(0, "g"), (1, "g")]
    board.answer(0, "g")
    board.answer(0, "g")
    assert board.ready == []
    board.answer(1, "g")
    assert board.ready == [(7, "")]


def test_a_grammar_is_built_once_for_all_requests() -> None:
    board = Board(0)
    board.builds.want(1, "g")
    board.builds.want(2, "g")
    assert board.sent == [(0, "g")]
    board.answer(0, "g")
    board.builds.want(3, "g")
    assert (board.sent, board.ready) == ([(0, "g")], [(1, ""), (2, ""), (3, "")])


def test_unneeded_grammars_are_dropped() -> None:
    board = Board(0)
    for request in (1, 2):
        board.builds.want(request, "g")
    board.builds.forget(1)
    board.builds.forget(1)
    assert len(board.builds) == 1
    board.builds.forget(2)
    assert len(board.builds) == 0
    board.answer(0, "g")
    assert board.ready == []
    board.builds.want(3, "g")
    assert board.sent == [(0, "g")] * 2


def test_without_a_worker_it_waits_for_one() -> None:
    board = Board()
    board.builds.want(1, "g")
    board.builds.watch(1)
    for _ in range(3):
        board.pass_time()
    assert (board.sent, board.ready, len(board.timers)) == ([], [], 1)
    board.builds.worker_up(0)
    board.answer(0, "g")
    assert board.ready == [(1, "")]


def test_a_worker_that_comes_back_gets_all_grammars_of_live_requests() -> None:
    board = Board(0)
    for request, grammar in enumerate(["a", "b", "c"]):
        board.builds.want(request, grammar)
        board.answer(0, grammar)
    board.builds.forget(1)
    board.builds.worker_lost(0)
    board.sent.clear()
    board.builds.worker_up(0)
    assert board.sent == [(0, "a"), (0, "c")]
    assert board.ready == [(0, ""), (1, ""), (2, "")]


def test_the_loss_of_the_last_worker_that_owed_an_answer_lets_the_others_serve() -> None:
    board = Board(0, 1)
    board.builds.want(1, "g")
    board.answer(0, "g")
    board.builds.worker_lost(1)
    assert board.ready == [(1, "")]


def test_an_invalid_grammar_ends_all_waiting_requests_and_is_tried_again_later() -> None:
    board = Board(0, 1)
    board.builds.want(1, "g")
    board.builds.want(2, "g")
    board.answer(1, "g", "no such token")
    assert board.ready == [(1, "no such token"), (2, "no such token")]
    board.answer(0, "g")
    board.builds.want(3, "g")
    assert board.sent == [(0, "g"), (1, "g")] * 2


def test_workers_do_not_die_of_one_grammar_for_ever() -> None:
    board = Board(0)
    board.builds.want(1, "g")
    for _ in range(MAX_LOSSES - 1):
        board.builds.worker_lost(0)
        assert board.ready == []
        board.builds.worker_up(0)
    board.builds.worker_lost(0)
    assert board.ready == [(1, "workers were lost while they built it")]
    board.sent.clear()
    board.builds.worker_up(0)
    assert board.sent == []


def test_every_wait_ends() -> None:
    board = Board(0)
    board.builds.want(1, "g")
    board.builds.watch(1)
    board.builds.watch(1)
    board.pass_time()
    board.answer(0, "g")
    board.pass_time()
    assert (board.ready, board.timers) == ([(1, "it was not built in time")], [])
