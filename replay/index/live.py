"""The index of a run that may still be written: brought up to date when that is asked for."""

from __future__ import annotations

from pathlib import Path

from eventlm.bus.log_reader import LogReader
from eventlm.bus.run_folder import TRACE_NAME
from eventlm.replay.index.index import Index
from eventlm.replay.index.open import RunIndexer, open_index, rebuild_or_say_why
from eventlm.types import OnProgress


class LiveIndex:
    """`index` is that of all that had been written at the latest look. Arguments: as of `open_index`.

    Raises as `open_index` does.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        verify: bool = True,
        trust_local_plugins: bool = False,
        partial: bool = False,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._indexer: RunIndexer | None = None
        with LogReader(path) as reader:
            if reader.still_being_written:
                header = reader.header
                self._rebuilt, missing = rebuild_or_say_why(
                    header, verify=verify, trust_local_plugins=trust_local_plugins
                )
                # Its last file will get another name when the next one begins; its folder stays.
                of_run = Path(reader.path).parent if Path(reader.path).name == TRACE_NAME else Path(reader.path)
                self._indexer = RunIndexer(str(of_run), header, self._rebuilt, missing)
                self._indexer.read(reader, partial=partial, on_progress=on_progress)
                self.index = Index(str(of_run), header, self._indexer.content(), self._rebuilt)
                return
        self.index = open_index(
            path, verify=verify, trust_local_plugins=trust_local_plugins, partial=partial, on_progress=on_progress
        )

    def read_on(self) -> bool:
        """Take what was written since. Returns whether there was anything; then `index` is another."""
        if self._indexer is None or self.index.facts.is_ended or not self._indexer.read_on():
            return False
        before = self.index
        self.index = Index(before.path, before.header, self._indexer.content(), self._rebuilt)
        return True
