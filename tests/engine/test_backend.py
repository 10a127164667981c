from __future__ import annotations

from eventlm.engine.backend import BackendError, BackendFailure


def test_a_failure_has_all_that_its_error_says() -> None:
    error = BackendError(
        "too long", "refused", status=400, retry_after_ns=7, param="messages", code="context_length_exceeded"
    )
    assert error.failure == BackendFailure("refused", "too long", 400, 7, "messages", "context_length_exceeded")
    assert vars(error) == {name: getattr(error.failure, name) for name in vars(error)}
