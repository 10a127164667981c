"""Which grammars live requests need, and which workers have built them.

A request with a grammar waits until every worker that is up has answered for it, or one has failed to build it. A new
worker gets all grammars of live requests before its first step, so that requests that were being served before a loss
wait as little as possible. There is no clock and no socket here: the owner passes in functions that send and that call
later.
"""

from __future__ import annotations

from collections.abc import Callable

from eventlm.grammars import GrammarError
from eventlm.worker.protocol import GrammarBuilt, PrepareGrammar

#: A grammar that this many workers died building is not given to another.
MAX_LOSSES = 2

#: A request whose grammar is not built after this time ends with an error.
GRAMMAR_SECONDS = 60.0

#: Sends a grammar to the worker of a replica.
Send = Callable[[int, PrepareGrammar], None]
#: Called when the grammar of a request is ready, or with the reason why it cannot be; only the client may see that.
Ready = Callable[[int, GrammarError | None], None]
#: Calls a function after so many seconds, if the engine is still alive.
Later = Callable[[float, Callable[[], None]], None]


class _Build:
    """One grammar. `requests` are the live ones, `waiting` those of them without a result yet."""

    __slots__ = ("grammar", "key", "num_losses", "pending", "requests", "waiting")

    def __init__(self, key: int, grammar: str) -> None:
        self.key = key
        self.grammar = grammar
        self.requests: set[int] = set()
        self.waiting: list[int] = []
        #: Replicas whose workers have not answered.
        self.pending: set[int] = set()
        self.num_losses = 0


class GrammarBuilds:
    """All grammars of live requests."""

    def __init__(self, send: Send, ready: Ready, later: Later) -> None:
        self._send = send
        self._ready = ready
        self._later = later
        self._up: set[int] = set()
        self._next_key = 0
        self._by_grammar: dict[str, _Build] = {}
        self._by_key: dict[int, _Build] = {}
        self._by_request: dict[int, _Build] = {}

    def __len__(self) -> int:
        return len(self._by_grammar)

    def want(self, request: int, grammar: str) -> None:
        """An admitted request waits for its grammar."""
        build = self._by_grammar.get(grammar)
        if build is None:
            build = _Build(self._next_key, grammar)
            self._next_key += 1
            self._by_grammar[grammar] = self._by_key[build.key] = build
            for replica in sorted(self._up):
                self._ask(build, replica)
        build.requests.add(request)
        build.waiting.append(request)
        self._by_request[request] = build
        self._settle(build)

    def forget(self, request: int) -> None:
        """A request is over, whether or not it had a grammar."""
        build = self._by_request.pop(request, None)
        if build is None:
            return
        build.requests.discard(request)
        if request in build.waiting:
            build.waiting.remove(request)
        if not build.requests:
            self._drop(build)

    def worker_up(self, replica: int) -> None:
        """A replica has a new worker, which has built no grammar."""
        self._up.add(replica)
        for build in list(self._by_grammar.values()):
            self._ask(build, replica)

    def worker_lost(self, replica: int) -> None:
        """A replica has lost its worker. A grammar that it was building may be the reason."""
        self._up.discard(replica)
        for build in list(self._by_grammar.values()):
            if replica not in build.pending:
                continue
            build.pending.discard(replica)
            build.num_losses += 1
            if build.num_losses >= MAX_LOSSES:
                self._fail(build, GrammarError("workers were lost while they built it"))
            else:
                self._settle(build)

    def built(self, replica: int, answer: GrammarBuilt) -> None:
        """Take in a worker's answer; nothing if no live request needs the grammar."""
        build = self._by_key.get(answer.key)
        if build is None or replica not in build.pending:
            return
        build.pending.discard(replica)
        if answer.error:
            self._fail(build, GrammarError(answer.error))
        else:
            self._settle(build)

    def watch(self, request: int) -> None:
        """Bound the wait for a grammar. llguidance bounds its own work; this is the second line of defence."""
        self._later(GRAMMAR_SECONDS, lambda: self._expire(request))

    def _expire(self, request: int) -> None:
        """A request has waited for long. If it still waits, it fails, or goes on waiting while no worker is up."""
        build = self._by_request.get(request)
        if build is None or request not in build.waiting:
            return
        if not self._up:
            self.watch(request)
            return
        build.waiting.remove(request)
        self._ready(request, GrammarError("it was not built in time"))

    def _ask(self, build: _Build, replica: int) -> None:
        build.pending.add(replica)
        self._send(replica, PrepareGrammar(key=build.key, grammar=build.grammar))

    def _settle(self, build: _Build) -> None:
        """Pass the result to waiting requests, once all workers have answered and at least one is up."""
        if self._up and not build.pending:
            self._tell(build, None)

    def _fail(self, build: _Build, error: GrammarError) -> None:
        self._tell(build, error)
        # A later request with it tries again.
        self._drop(build)

    def _tell(self, build: _Build, error: GrammarError | None) -> None:
        waiting, build.waiting = build.waiting, []
        for request in waiting:
            self._ready(request, error)

    def _drop(self, build: _Build) -> None:
        self._by_key.pop(build.key, None)
        if self._by_grammar.get(build.grammar) is build:
            del self._by_grammar[build.grammar]
        for request in build.requests:
            self._by_request.pop(request, None)
