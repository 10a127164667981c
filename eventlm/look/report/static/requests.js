// Requests: as a timeline, the worst of them as a table, and the story of one.

import { h } from "preact";
import { useMemo } from "preact/hooks";
import { Card } from "./cards.js";
import { formatDuration, formatNumber } from "./format.js";
import { useRun } from "./loaded.js";
import { usePlace } from "./place.js";
import { RequestStory } from "./request_story.js";
import { Table } from "./table.js";
import { Timeline } from "./timeline.js";

/** The row of the request that the address names, or null. */
function rowOf(run, name) {
  if (name === undefined) return null;
  const row = run.timeline.names.indexOf(name);
  return row < 0 ? null : row;
}

export function TimelineTab({ data }) {
  const run = useRun(data);
  const [place, go] = usePlace();
  if (!run) return h("p", {}, "Loading…");
  if (run.timeline.requests.rows === 0) return h("p", { class: "note" }, "No request arrived.");
  const isHere = place.tab === "timeline";
  const selected = isHere ? rowOf(run, place.values.request) : null;
  const [from, to] = stretchOf(run, place.values, selected, data.end);
  return [
    h(
      Card,
      { title: "Requests over time" },
      h(Timeline, {
        model: run.timeline,
        selected,
        from,
        to,
        onSelect: (row) => go("timeline", { request: row === null ? null : run.timeline.names[row] }),
      }),
    ),
    selected === null
      ? h("p", { class: "note" }, "Click a request, or press Enter on it, to see its story.")
      : h(RequestStory, { data, run, row: selected, onSelect: (name) => go("timeline", { request: name, near: 1 }) }),
  ];
}

/** What the address asks to see: a stretch of time, or that in which the request lived; else nulls. */
function stretchOf(run, values, selected, end) {
  if (values.near && selected !== null) {
    const { arrived, ended } = run.timeline.requests;
    const margin = Math.max((ended[selected] - arrived[selected]) * 0.15, end / 1e5);
    return [Math.max(0, arrived[selected] - margin), Math.min(end, ended[selected] + margin)];
  }
  const from = Number(values.from ?? NaN);
  const to = Number(values.to ?? NaN);
  return from < to ? [from, to] : [null, null];
}

export function Requests({ data }) {
  const run = useRun(data);
  const [place, go] = usePlace();
  const rows = useMemo(
    () =>
      run &&
      data.worst.map((row) => {
        const value = (name) => (run.requests[name][row] < 0 ? null : run.requests[name][row]);
        return {
          row,
          name: run.timeline.names[row],
          group: run.timeline.classes[run.timeline.requests.class[row]],
          ttft: value("ttft"),
          tpot: value("tpot"),
          e2e: value("e2e"),
          queue: value("queue"),
          prompt: run.requests.prompt[row],
          output: run.requests.output[row],
          preemptions: run.requests.preemptions[row],
          end: data.names[run.requests.reason[row]] ?? "unfinished",
        };
      }),
    [run],
  );
  if (!run) return h("p", {}, "Loading…");
  const chosen = place.tab === "requests" ? rowOf(run, place.values.request) : null;
  const time = (title, name) => ({ title, value: (row) => row[name], format: formatDuration, number: true });
  const count = (title, name, note) => ({ title, value: (row) => row[name], format: formatNumber, number: true, note });
  const columns = [
    { title: "Request", value: (row) => row.name },
    { title: "Class", value: (row) => row.group },
    time("TTFT", "ttft"),
    time("End to end", "e2e"),
    time("Queue", "queue"),
    time("TPOT", "tpot"),
    count("Prompt", "prompt", "tokens"),
    count("Output", "output", "tokens"),
    count("Preempted", "preemptions", "times"),
    { title: "End", value: (row) => row.end },
  ];
  return [
    h(
      Card,
      { title: "The worst requests" },
      h("p", { class: "note" }, "Those that waited longest, took longest or were preempted most, and those that findings name."),
      h(Table, {
        caption: "The worst requests",
        columns,
        rows,
        selected: rows.find((row) => row.row === chosen),
        onSelect: (row) => go("requests", { request: row.name }),
        empty: "No request arrived.",
      }),
    ),
    chosen !== null &&
      h(RequestStory, { data, run, row: chosen, onSelect: (name) => go("requests", { request: name }) }),
  ];
}
