"""The sequences that have not ended, by what the log says of them, and the sums and gauges that they count in."""

from __future__ import annotations

from eventlm.metrics.aggregates import ReplicaMetrics
from eventlm.metrics.live import Identity, LiveReplica, LiveSequenceMetrics, Phase


class LiveSequences:
    """Sequences and replicas of the metrics store. Each method is something that happens to a sequence."""

    def __init__(self) -> None:
        self.replicas: list[LiveReplica] = []
        self.sequences: dict[Identity, LiveSequenceMetrics] = {}

    def count_waiting(self, sequence: LiveSequenceMetrics, change: int) -> None:
        """It begins to wait (1), or ends that (-1)."""
        home = sequence.home if sequence.home >= 0 else sequence.request.first_replica
        metrics = self.replicas[home].metrics
        metrics.num_waiting += change
        if sequence.waits_for_grammar:
            metrics.num_waiting_for_grammar += change

    def set_home(self, sequence: LiveSequenceMetrics, home: int) -> None:
        """It belongs to a replica; -1: to none."""
        waits = sequence.phase is Phase.WAITING
        if waits:
            self.count_waiting(sequence, -1)
        sequence.home = home
        if waits:
            self.count_waiting(sequence, 1)

    def start_running(self, sequence: LiveSequenceMetrics, replica: int, now_ns: int) -> None:
        """It waits no more."""
        self.count_waiting(sequence, -1)
        if sequence.replica >= 0:
            # Its last token may have come from another replica.
            self.replicas[sequence.replica].token_times.leave(sequence.identity)
        sequence.phase = Phase.RUNNING
        sequence.replica = replica
        self.replicas[replica].metrics.num_running += 1
        if sequence.launched_ns is None:
            sequence.launched_ns = now_ns
        if sequence.preempted_ns is not None:
            sequence.preemption_ns += now_ns - sequence.preempted_ns
            sequence.preempted_ns = None
            sequence.num_restarts += 1

    def move_running(self, sequence: LiveSequenceMetrics, replica: int) -> None:
        """It runs on another replica from now on, where it has been all the while."""
        self.replicas[sequence.replica].metrics.num_running -= 1
        sequence.replica = replica
        self.replicas[replica].metrics.num_running += 1

    def stop_running(self, sequence: LiveSequenceMetrics, now_ns: int) -> None:
        """It waits again."""
        self.leave_phase(sequence)
        sequence.phase = Phase.WAITING
        sequence.preempted_ns = now_ns
        self.count_waiting(sequence, 1)

    def first_token(self, sequence: LiveSequenceMetrics, metrics: ReplicaMetrics, now_ns: int) -> None:
        """Its first token is there."""
        sequence.first_token_ns = now_ns
        if sequence.request.is_branch:
            return
        metrics.histograms["prefill_e2e_time"].observe(now_ns - sequence.request.received_ns)
        self.prefill_done(sequence, metrics, now_ns)

    def prefill_done(self, sequence: LiveSequenceMetrics, metrics: ReplicaMetrics, now_ns: int) -> None:
        """Its prompt is computed, and its deadline is met or missed."""
        request = sequence.request
        if not request.is_forwarded:
            metrics.prompt_tokens += request.prompt_tokens
            metrics.cached_tokens += sequence.cached_tokens
        if request.deadline_ns:
            slack_ns = request.arrived_ns + request.deadline_ns - now_ns
            metrics.histograms["deadline_slack"].observe(slack_ns)
            if slack_ns >= 0:
                metrics.num_deadlines_met += 1
            else:
                metrics.num_deadlines_missed += 1

    def leave_phase(self, sequence: LiveSequenceMetrics) -> None:
        """Take it out of the gauges, and release its blocks."""
        if sequence.phase is Phase.WAITING:
            self.count_waiting(sequence, -1)
        elif sequence.phase is Phase.RUNNING:
            replica = self.replicas[sequence.replica]
            replica.metrics.num_running -= 1
            replica.release_table(sequence.table)

    def end_phase(self, sequence: LiveSequenceMetrics, now_ns: int) -> None:
        """It neither waits nor runs any more."""
        self.leave_phase(sequence)
        if sequence.preempted_ns is not None:
            sequence.preemption_ns += now_ns - sequence.preempted_ns
            sequence.preempted_ns = None
        sequence.phase = Phase.ENDING
        sequence.held_until_ns = now_ns
