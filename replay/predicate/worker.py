"""The process that runs trials: `python -m eventlm.replay.predicate.worker`."""

from __future__ import annotations

from eventlm.replay.pool.serve import serve
from eventlm.replay.predicate.trial import Trial, run_trial

if __name__ == "__main__":
    serve(run_trial, Trial)
