"""A rank of a fake replica: all of them compute all tokens, one of them is struck by each fault, the others feel it."""

from __future__ import annotations

from collections.abc import Sequence

from eventlm.core.shards import Layout
from eventlm.events import Launched
from eventlm.types import SequenceId
from eventlm.worker.fake.tokens import draw
from eventlm.worker.protocol import StepPayload
from eventlm.worker.runner import PeerLostError
from eventlm.worker.sequence_table import DesyncError, Row


class FakeWait(Exception):
    """The step never ends, because another rank will not come to the end of it."""


class FakeNotice(PeerLostError):
    """This rank notices that another one, whose number is `rank`, is gone."""

    def __init__(self, rank: int) -> None:
        super().__init__("another rank is gone")
        self.rank = rank


class FakeRank:
    """How one rank of a layout differs from a worker alone.

    A rank whose stage does not sample knows the tokens of a step from the engine only. Here it has drawn them itself,
    and checks that it gets the same ones, and in time.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._must_be_told = layout.place_of(rank).stage < layout.stages - 1
        #: Of steps whose tokens have not come.
        self._drawn: dict[int, Sequence[list[int]]] = {}
        #: The step that gave a sequence its last token, if that token has not come.
        self._owed: dict[SequenceId, int] = {}

    def check_fault(self, name: str, *where: int) -> None:
        """A replica fails like this here. Returns if it begins with this rank.

        Else raises what this rank makes of it: FakeNotice or FakeWait.
        """
        struck = draw("rank", name, *where) % self._layout.num_ranks
        if struck == self._rank:
            return
        if name != "hang" and draw("notice", name, *where, self._rank) % 2:
            raise FakeNotice(struck)
        raise FakeWait

    def take_results(self, launch: Launched, payload: StepPayload) -> None:
        """Before the rest of a launch. Raises DesyncError."""
        for step, tokens in payload.results:
            drawn = self._drawn.pop(step, None)
            if drawn is not None and drawn != tokens:
                raise DesyncError(f"step {step} gave {tokens}, and here {drawn}")
            self._owed = {identity: since for identity, since in self._owed.items() if since != step}
        for identity in [*launch.forget, *((new.request, new.index) for new in payload.new)]:
            self._owed.pop(SequenceId(*identity), None)

    def check_rows(self, launch: Launched) -> None:
        """Raise DesyncError for a row that follows a token that has not come."""
        for request, index, *_ in launch.decodes:
            step = self._owed.get(SequenceId(request, index))
            if step is not None:
                raise DesyncError(f"sequence {request}/{index} follows step {step}, whose tokens are not here")

    def note(self, step: int, rows: Sequence[Row], tokens: Sequence[list[int]]) -> None:
        """Note what a step gives; the engine confirms it later."""
        if self._must_be_told:
            self._drawn[step] = tokens
            self._owed |= {row.sequence.id: step for row in rows if row.samples}
