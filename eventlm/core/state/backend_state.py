"""What a set of other servers has beside its replicas' caches: how much each may have at once, the attempts under way,
and what retries may cost.
"""

from __future__ import annotations

from msgspec import Struct

from eventlm.config.core import Forwarding
from eventlm.core.state.sequence import Sequence
from eventlm.types import SequenceId

#: A share that no request has earned, in millionths of a retry.
GIVEN_PPM = 10_000_000
#: The most that is saved up for bad times.
MOST_SAVED_PPM = 100_000_000
RETRY_PPM = 1_000_000
#: First tokens that take so many times as long as the quickest did, for each token of the prompt, have waited there.
QUEUED_FACTOR = 4
#: And so long at least: less is no queue worth fighting.
QUEUED_NS = 200_000_000
#: A backend that runs so many times as many as wait there takes those up with its next step.
_RUNNING_TO_WAITING = 16
#: Stands for what a request costs beside its prompt.
_FIXED_TOKENS = 32


class BackendCapacity(Struct):
    """How many requests a backend may have at once. A limit that is not known is found by trying: it doubles while all
    goes well, and after the first sign of a queue there it grows by one for each load of that size (additive increase)
    and falls by three tenths with each such sign (multiplicative decrease), or by what waits there if that is known.

    limit_milli: now, in thousandths. most: it never grows beyond that. weight_ppm: share of the load against others'.
    num_hedges: second attempts that it has, whose sequences are resident elsewhere. running, waiting, kv_used_ppm: as
    its metrics said last; -1: they do not. ns_per_token: the quickest first token lately, for each token of its prompt.
    decreased_at: position of the last decrease in the log; what was sent before it proves nothing new.
    """

    most: int
    limit_milli: int
    weight_ppm: int = 1_000_000
    num_hedges: int = 0
    is_doubling: bool = True
    running: int = -1
    waiting: int = -1
    kv_used_ppm: int = -1
    ns_per_token: int = 0
    decreased_at: int = 0

    @property
    def limit(self) -> int:
        """Most requests at once."""
        return self.limit_milli // 1000

    def note_success(self, num_running: int) -> None:
        """An answer is complete, of so many that the backend had. The limit grows only where it is used."""
        if 2 * num_running >= self.limit:
            step = 1000 if self.is_doubling else max(1_000_000 // self.limit_milli, 1)
            self.limit_milli = min(self.limit_milli + step, 1000 * self.most)

    def note_queue(self, sent: int, now: int) -> None:
        """There is a sign that a request waited there. sent, now: positions in the log at which it was sent, and the
        present one.
        """
        if sent > self.decreased_at:
            self.limit_milli = max(self.limit_milli * 7 // 10, 1000)
            self.is_doubling = False
            self.decreased_at = now

    def note_waiting(self, num_sent: int, now: int) -> None:
        """Its metrics have come. Of those that wait there, by their share of all that it has, some are ours: the limit
        falls to what else it has of ours. A few that came since its last step are no queue, and neither is one alone.
        """
        running = max(self.running, 0)
        too_many = self.waiting - running // _RUNNING_TO_WAITING
        if too_many <= 0 or self.waiting == 1:
            return
        num_ours = too_many * num_sent // max(running + self.waiting, num_sent)
        if num_ours:
            enough_milli = min(self.limit_milli, 1000 * (num_sent - num_ours))
            self.limit_milli = max(self.limit_milli * 7 // 10, enough_milli, 1000)
            self.is_doubling = False
            self.decreased_at = now

    def has_queued(self, taken_ns: int, num_tokens: int) -> bool:
        """Whether a first token that took so long, for so many tokens of a prompt, has waited."""
        ns_per_token = taken_ns // (num_tokens + _FIXED_TOKENS)
        if not self.ns_per_token or ns_per_token < self.ns_per_token:
            self.ns_per_token = ns_per_token
            return False
        # The quickest one may be long ago.
        self.ns_per_token += self.ns_per_token >> 6
        return taken_ns >= QUEUED_NS and ns_per_token > QUEUED_FACTOR * self.ns_per_token


class Attempts(Struct):
    """The attempts of one sequence. number: how many there were. current: the one that its residency stands for; 0:
    none, it waits. lost: how many ended because their engine did. sent, sent_ns: position in the log, and time, of that
    one. hedge, hedge_replica, hedge_sent, hedge_sent_ns: a second one that is under way elsewhere. avoided: where the
    last one failed, -1: nowhere. due_ns: when it may be sent again after that.
    """

    number: int = 0
    current: int = 0
    sent: int = 0
    sent_ns: int = 0
    hedge: int = 0
    hedge_replica: int = -1
    hedge_sent: int = 0
    hedge_sent_ns: int = 0
    avoided: int = -1
    due_ns: int = 0
    lost: int = 0

    @property
    def num_failed(self) -> int:
        """How many there were, less those that nobody is to blame for."""
        return self.number - self.lost


class Forwards:
    """Of a set. attempts: of all sequences that were sent anywhere. resting: those that wait for their next attempt and
    are in no line meanwhile. balance_ppm: what retries and hedges may still cost.
    """

    def __init__(self, config: Forwarding) -> None:
        self.config = config
        self.attempts: dict[SequenceId, Attempts] = {}
        self.resting: dict[SequenceId, Sequence] = {}
        self.balance_ppm = GIVEN_PPM

    def earn(self) -> None:
        """A request was sent for the first time."""
        self.balance_ppm = min(self.balance_ppm + self.config.retry_share_ppm, MOST_SAVED_PPM)

    def pay(self) -> bool:
        """Take the price of one more attempt; False if there is too little."""
        if self.balance_ppm < RETRY_PPM:
            return False
        self.balance_ppm -= RETRY_PPM
        return True

    def summary(self) -> str:
        """What a digest must see of it."""
        attempts = [(*identity, *_values(each)) for identity, each in self.attempts.items()]
        return f"{self.balance_ppm} {attempts} {[tuple(identity) for identity in self.resting]}"


def _values(attempts: Attempts) -> tuple[int, ...]:
    return tuple(getattr(attempts, name) for name in Attempts.__struct_fields__)
