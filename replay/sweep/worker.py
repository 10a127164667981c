"""The process that runs cells of a sweep: `python -m eventlm.replay.sweep.worker`.

It reads a `CellSpec` as JSON from each line of its input and writes a `CellResult` as a line, until its input ends. It
reads the workload once.
"""

from __future__ import annotations

from eventlm.config.load import load_config
from eventlm.errors import EventLMError, UsageError
from eventlm.replay.pool.serve import serve
from eventlm.replay.simulate.replicasets import build_replicasets
from eventlm.replay.simulate.simulation import simulate
from eventlm.replay.sweep.cell import CellResult, CellSpec
from eventlm.replay.workload.source import LoadedWorkload, load_workload, workload_hash


class CellRunner:
    """Runs cells one after the other."""

    def __init__(self) -> None:
        self._loaded: tuple[str, str, LoadedWorkload] | None = None

    def run(self, spec: CellSpec) -> CellResult:
        """Simulate a cell; errors are results too."""
        try:
            loaded = self._load(spec)
            config = load_config(None, spec.options, environment={})
            engine, cost, workload = build_replicasets(config, loaded, spec.costs)
            result = simulate(
                workload.sped_up(spec.load_ppm), engine.setup, cost, predictor=engine.predictor, others=engine.others
            )
            return CellResult(summary=result.summary)
        except EventLMError as error:
            return CellResult(error=str(error))
        except Exception as error:
            # Other cells may succeed.
            return CellResult(error=f"a defect, {type(error).__name__}: {error}")

    def _load(self, spec: CellSpec) -> LoadedWorkload:
        if self._loaded is None or self._loaded[:2] != (spec.workload, spec.workload_hash):
            if workload_hash(spec.workload) != spec.workload_hash:
                raise UsageError(f"the workload {spec.workload} has changed since the sweep began")
            self._loaded = (spec.workload, spec.workload_hash, load_workload(spec.workload))
        return self._loaded[2]


if __name__ == "__main__":
    serve(CellRunner().run, CellSpec)
