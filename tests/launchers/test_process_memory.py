"""Workers that the memory of this host does not hold."""

from __future__ import annotations

import pytest

from eventlm.errors import UsageError
from eventlm.launchers.process_memory import FAKE_PROCESS_BYTES, PROCESS_BYTES, check_process_memory


def test_each_model_has_its_own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [2 * PROCESS_BYTES + 3 * FAKE_PROCESS_BYTES]
    monkeypatch.setattr("eventlm.launchers.process_memory.free_bytes", lambda: free[0])
    check_process_memory({"a": 2, "fake": 3}, "")
    with pytest.raises(UsageError, match=r"^5 worker processes take .* are free here; take fewer$"):
        check_process_memory({"a": 3, "fake": 2}, "take fewer")
    free[0] = 0
    # What one takes is for the plan of its model.
    check_process_memory({"a": 1}, "")
