"""`eventlm trace grep`: the lines of a trace that are about something, as they stand in the file."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from eventlm.cli.output import file_progress, warn
from eventlm.cli.parser import Parser, add_number
from eventlm.cli.time_window import add_window_flags, parse_window
from eventlm.cli.trace_path import add_trace_argument, trace_file
from eventlm.config.options import did_you_mean
from eventlm.errors import UsageError

if TYPE_CHECKING:
    from eventlm.bus.trace_grep import Query

_REQUEST = re.compile(r"(\d{1,18})(?:\.(\d{1,9}))?")


def configure(parser: Parser) -> None:
    """Add the command's arguments."""
    parser.description = "Print lines of a trace as they stand in the file: about a request, of a kind, of a time."
    parser.epilog = """\
examples:
  eventlm trace grep --request 17             all about request 17, from its
                                              arrival (event 17) to its end
  eventlm trace grep --request 17.0 --kind launch | jq .chunks
  eventlm trace grep runs/latest --from 1.5s --to 2s --kind preempt,finish
  eventlm trace grep --cause 812              what event 812 led to

A line must match all flags. A launch is about the requests in its rows, and so
are its completion (`done`) and what that led to. Lines before the time or the
request are skipped, and their hashes are not checked."""
    parser.add_argument("--request", metavar="S[.INDEX]", help="a request by the event of its arrival, or one sample")
    parser.add_argument(
        "--kind", action="append", default=[], metavar="TAG,...", help="kinds of events, such as launch,done"
    )
    add_window_flags(parser)
    add_number(parser, "--cause", "what this event led to", least=0, metavar="S")
    add_trace_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the matching lines."""
    from msgspec import structs

    from eventlm.bus.log_reader import LogReader
    from eventlm.bus.trace_grep import grep

    query = _query(arguments)
    path = trace_file(arguments.path)
    window = parse_window(arguments, path)
    if window is not None:
        # A window excludes its end, and a query includes it.
        to_ns = None if window.to_ns is None else window.to_ns - 1
        query = structs.replace(query, from_ns=window.from_ns, to_ns=to_ns)
    with LogReader(path, strict=arguments.strict) as reader:
        with file_progress("searching", path) as on_progress:
            found = False
            for line in grep(reader, query, on_progress=on_progress):
                sys.stdout.write(line.decode())
                found = True
        if not found:
            warn(["no line matches"])
        # Unless all was read, it is not known how the trace ends.
        if query.to_ns is None and reader.num_lines:
            warn(reader.warnings())
    return 0


def _query(arguments: argparse.Namespace) -> Query:
    from eventlm.bus.trace_grep import Query

    request = index = None
    if arguments.request is not None:
        match = _REQUEST.fullmatch(arguments.request)
        if match is None:
            raise UsageError(f"--request {arguments.request}: not a request such as 17, nor a sample such as 17.0")
        request, index = int(match[1]), int(match[2]) if match[2] else None
    return Query(request=request, index=index, tags=_tags(arguments.kind), cause=arguments.cause)


def _tags(texts: list[str]) -> frozenset[str]:
    from eventlm.events import DECISIONS, FACTS, MARKERS

    known = [str(kind.__struct_config__.tag) for kind in (*FACTS, *DECISIONS, *MARKERS)]
    tags = [tag.strip() for text in texts for tag in text.split(",") if tag.strip()]
    if texts and not tags:
        raise UsageError(f"--kind {texts[0]!r} names no kind of event; known: {', '.join(known)}")
    for tag in tags:
        if tag not in known:
            hint = did_you_mean(tag, known, listed_as="known")
            raise UsageError(f"--kind {tag}: no such kind of event{hint}")
    return frozenset(tags)
