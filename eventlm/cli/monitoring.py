"""`eventlm monitoring`: files for Prometheus and Grafana."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from eventlm.cli.parser import Parser, exit_code_lines
from eventlm.errors import ExitCode, UsageError

_JOB = re.compile(r"[A-Za-z0-9_.-]+")
_TARGET = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Write a dashboard for Grafana, alert rules for Prometheus, and a configuration that scrapes a\n"
        "server's /metrics. They are made from the metrics that this version has: write them again after an\n"
        "upgrade. Each alert names the command to run on the server's machine."
    )
    parser.epilog = """\
examples:
  eventlm monitoring -o monitoring
  eventlm monitoring -o monitoring --target 10.0.0.7:8000 --ttft-seconds 2
  prometheus --config.file monitoring/prometheus.yml

In Grafana: Dashboards, New, Import, and then dashboard.json.

""" + exit_code_lines(ExitCode.USAGE)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="folder to write to")
    parser.add_argument(
        "--job", default="eventlm", metavar="NAME", help="Prometheus's job of the servers (%(default)s)"
    )
    parser.add_argument(
        "--target", default="127.0.0.1:8000", metavar="HOST:PORT", help="server to scrape (%(default)s)"
    )
    parser.add_argument(
        "--queue-seconds",
        type=float,
        default=10,
        metavar="SECONDS",
        help="alert when one of ten requests queues for longer (%(default)s)",
    )
    parser.add_argument(
        "--ttft-seconds",
        type=float,
        default=5,
        metavar="SECONDS",
        help="alert when one of twenty first tokens takes longer (%(default)s)",
    )
    parser.add_argument(
        "--objective",
        type=float,
        default=99,
        metavar="PERCENT",
        help="of a service class's sequences, how many should meet its objectives: 95 to 99.999 (%(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print their names."""
    from eventlm.monitoring.alerts import LEAST_OBJECTIVE, MOST_OBJECTIVE, Thresholds
    from eventlm.monitoring.files import monitoring_files, write_files

    if not _JOB.fullmatch(arguments.job):
        raise UsageError(f"--job {arguments.job}: must consist of letters, digits, dots, dashes and underscores")
    target = _TARGET.fullmatch(arguments.target)
    if target is None or not 0 < int(target[1]) < 1 << 16:
        raise UsageError(f"--target {arguments.target}: must be HOST:PORT of a server, such as 10.0.0.7:8000")
    least, most = 100 * LEAST_OBJECTIVE, 100 * MOST_OBJECTIVE
    if not least <= arguments.objective <= most:
        raise UsageError(
            f"--objective {arguments.objective:.16g}: must be from {least:g} to {most:g} percent; at a lower one no "
            "share of misses is high enough for the alert"
        )
    for name in ("queue_seconds", "ttft_seconds"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise UsageError(f"--{name.replace('_', '-')}: must be a number of seconds above 0")
    thresholds = Thresholds(arguments.queue_seconds, arguments.ttft_seconds, arguments.objective / 100)
    for path in write_files(Path(arguments.output), monitoring_files(arguments.job, arguments.target, thresholds)):
        print(path)
    return 0
