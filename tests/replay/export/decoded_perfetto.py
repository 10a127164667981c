"""What a Perfetto trace says, decoded with Perfetto's own protobufs and put together as its trace processor does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent


class Slice(NamedTuple):
    """A slice, or an instant with `start_ns` equal to `end_ns`. parent: the name of the slice around it."""

    track: str
    name: str
    start_ns: int
    end_ns: int
    parent: str
    args: dict[str, int | str]


class Decoded:
    """slices: in order of their begins. flows: (from, to) of each. counters: (ns, value) by track."""

    def __init__(self, path: Path) -> None:
        trace = Trace()
        trace.ParseFromString(path.read_bytes())
        self.trace = trace
        self.tracks: dict[int, str] = {}
        self.counters: dict[str, list[tuple[int, int]]] = {}
        self.slices: list[Slice] = []
        self.flows: list[tuple[Slice, Slice]] = []
        self._names: dict[int, str] = {}
        self._keys: dict[int, str] = {}
        self._describe()
        self._replay()

    def _describe(self) -> None:
        first = self.trace.packet[0]
        self._names = {each.iid: each.name for each in first.interned_data.event_names}
        self._keys = {each.iid: each.name for each in first.interned_data.debug_annotation_names}
        own: dict[int, tuple[int, str]] = {}
        for packet in self.trace.packet:
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in own
                own[track.uuid] = (track.parent_uuid, track.name or track.process.process_name)
        for uuid, (parent, name) in own.items():
            self.tracks[uuid] = f"{own[parent][1]}/{name}" if parent else name

    def _replay(self) -> None:
        """Sort by time, with ties in the order of the file, and match begins with ends."""
        events = [packet for packet in self.trace.packet if packet.HasField("track_event")]
        stacks: dict[int, list[int]] = {}
        found: list[dict[str, Any]] = []
        origins: dict[int, int] = {}
        links: list[tuple[int, int]] = []
        for packet in sorted(events, key=lambda packet: int(packet.timestamp)):
            event, ns = packet.track_event, packet.timestamp
            stack = stacks.setdefault(event.track_uuid, [])
            args = {self._keys[each.name_iid]: _value(each) for each in event.debug_annotations}
            if event.type == TrackEvent.TYPE_COUNTER:
                self.counters.setdefault(self.tracks[event.track_uuid], []).append((ns, event.counter_value))
                continue
            if event.type == TrackEvent.TYPE_SLICE_END:
                ended = found[stack.pop()]
                ended["end_ns"] = ns
                ended["args"] |= args
                continue
            number = len(found)
            for flow in event.flow_ids:
                assert flow not in origins
                origins[flow] = number
            # A flow that ends before it began is dropped by the viewer.
            links += [(origins.pop(flow), number) for flow in event.terminating_flow_ids]
            name = event.name or self._names[event.name_iid]
            parent = found[stack[-1]]["name"] if stack else ""
            track = self.tracks[event.track_uuid]
            found.append({"track": track, "name": name, "start_ns": ns, "end_ns": ns, "parent": parent, "args": args})
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                stack.append(number)
        assert not origins, "flows that do not end"
        assert not any(stacks.values()), "slices that do not end"
        self.slices = [Slice(**each) for each in found]
        self.flows = [(self.slices[begin], self.slices[end]) for begin, end in links]


def _value(annotation: Any) -> int | str:
    kind = annotation.WhichOneof("value")
    value: int | str = getattr(annotation, kind)
    return value
