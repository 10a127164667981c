"""Messages come out as they went in."""

from __future__ import annotations

import msgspec
import pytest

from eventlm.telemetry.messages import (
    Callers,
    ExportReport,
    ExportSetup,
    StopExport,
    decode_report,
    decode_to_export,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [ExportSetup(run_folder="runs/x", url="http://x/v1/traces", from_s=7), Callers("00-1-2-01", [3, 4]), StopExport()],
)
def test_to_the_process(message: ExportSetup | Callers | StopExport) -> None:
    assert decode_to_export(encode(message)) == message


def test_reports() -> None:
    report = ExportReport(num_sent=5, num_dropped={"refused": 2}, problem="HTTP 400", resume_s=9)
    assert decode_report(encode(report)) == report
    with pytest.raises(msgspec.DecodeError):
        decode_report(encode(StopExport()))
