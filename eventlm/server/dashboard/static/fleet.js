// Replicas, backends and service classes, one in a row.

import { h } from "preact";
import { Card } from "./cards.js";
import { formatDuration, formatNumber } from "./format.js";
import { total } from "./frames.js";
import { Table } from "./table.js";

function number(title, value, format = formatNumber, note = undefined) {
  return { title, value, format, number: true, note };
}
const formatPercent = (value) => (value === null ? "–" : `${formatNumber(value)}%`);

const REPLICA_COLUMNS = [
  { title: "Replica", value: (row) => row.index },
  { title: "State", value: (row) => (row.is_up ? "up" : "down") },
  number("Tokens/s", (row) => row.generation_tokens_per_s),
  number("Prompt/s", (row) => row.prompt_tokens_per_s),
  number("Running", (row) => row.num_running),
  number("Waiting", (row) => row.num_waiting, formatNumber, "What may run on any replica is counted under the first"),
  number("In a step", (row) => row.batch_size.mean ?? null, formatNumber, "Sequences, on average"),
  number("Step p50", (row) => row.step_ns.p50 ?? null, formatDuration),
  number("Step p99", (row) => row.step_ns.p99 ?? null, formatDuration),
  number("Busy", (row) => row.busy_percent, formatPercent, "By the worker's clock"),
  number("Blocks held", (row) => row.num_held_blocks),
  number("Blocks cached", (row) => row.num_cached_blocks ?? null),
  number("Preempted", (row) => row.preempted, formatNumber, "Since this page was opened, ten minutes at most"),
  number("Lost", (row) => row.lost, formatNumber, "Workers, since this page was opened, ten minutes at most"),
];

const RANKS = { title: "Ranks", value: (row) => row.ranks ?? "one process" };

const STAGE_COLUMNS = [
  { title: "Replica", value: (row) => row.replica },
  { title: "Stage", value: (row) => row.number },
  number("Busy", (row) => row.busy_percent, formatPercent, "By the clock of its host"),
  number("Waiting", (row) => row.wait_ns, formatDuration, "Of a step while the stage has another, on average"),
  number("Exchange", (row) => row.exchange_ns, formatDuration, "The rest of a step's way from the stage before"),
];

const GROUP_COLUMNS = [
  { title: "Replica", value: (row) => row.replica },
  { title: "KV group", value: (row) => row.number },
  number("Tokens/s", (row) => row.tokens_per_s, formatNumber, "Computed, not shown"),
  number("Blocks held", (row) => row.num_held_blocks),
  number("Blocks", (row) => row.num_blocks),
];

const BACKEND_COLUMNS = [
  { title: "Backend", value: (row) => row.name },
  { title: "State", value: (row) => conditionOf(row) },
  number("In flight", (row) => row.num_running, formatNumber, "Attempts of this server"),
  number("Limit", (row) => row.limit || null, formatNumber, "How many it may have at once"),
  number("Waiting", (row) => said(row.reported_waiting), formatNumber, "There, whoever sent them, if it says"),
  number("KV cache", (row) => (row.reported_kv_ppm < 0 ? null : row.reported_kv_ppm / 1e4), formatPercent, "If it says"),
  number("Tokens/s", (row) => row.generation_tokens_per_s),
  number("TTFT p50", (row) => row.p50, formatDuration, "Since an attempt was sent, in the last second with one"),
  number("TTFT p99", (row) => row.p99, formatDuration),
  number("Answered", (row) => row.answered, formatNumber, "Since this page was opened, ten minutes at most"),
  number("Failed", (row) => row.failed, formatNumber, "Attempts, since this page was opened, ten minutes at most"),
  number("Retried", (row) => row.retried, formatNumber, "Failures after which a request was to be sent again"),
  { title: "Failures", value: (row) => row.kinds || "–" },
  { title: "Kind", value: (row) => row.kind || "–" },
];

const said = (value) => (value < 0 ? null : value);

function conditionOf({ is_up, down_reason }) {
  if (is_up || down_reason === "drained") return is_up ? "up" : "drained";
  return down_reason ? `down: ${down_reason}` : "down";
}

function backendRows({ frames, latest }) {
  return latest.frame.replicas.flatMap(({ backend, is_up, generation_tokens_per_s }, index) => {
    if (!backend) return [];
    const own = frames
      .map(({ frame }) => frame.replicas[index]?.backend)
      .filter((each) => each?.name === backend.name);
    const failures = {};
    for (const { failures: added } of own)
      for (const [kind, count] of Object.entries(added)) failures[kind] = (failures[kind] ?? 0) + count;
    return {
      ...backend,
      is_up,
      generation_tokens_per_s,
      p50: last(own, "p50"),
      p99: last(own, "p99"),
      answered: sum(own, (each) => each.num_answers),
      failed: total(failures),
      retried: sum(own, (each) => each.num_retries),
      kinds: Object.entries(failures)
        .map(([kind, count]) => `${kind} ${formatNumber(count)}`)
        .join(", "),
    };
  });
}

function last(backends, percentile) {
  return backends.findLast((each) => each.first_token_ns.count)?.first_token_ns[percentile] ?? null;
}

/** The replicas with workers, and the other servers. */
export function Replicas(views) {
  if (!views.latest) return null;
  const { replicas } = views.latest.frame;
  const hasOwn = replicas.some((each) => !each.forwards);
  return [
    replicas.some((each) => each.forwards) &&
      h(
        Card,
        { key: "backends", title: "Backends" },
        h(Table, {
          caption: "Backends",
          columns: BACKEND_COLUMNS,
          rows: backendRows(views),
          empty: "No backend has answered yet.",
        }),
      ),
    (hasOwn || !replicas.length) && h(OwnReplicas, { key: "own", ...views }),
  ];
}

function OwnReplicas({ frames, latest, oldest }) {
  const cached = new Map(oldest?.replicas.map((each) => [each.replica, each.num_cached_blocks]));
  const rows = latest.frame.replicas.flatMap((replica, index) =>
    replica.forwards
      ? []
      : {
          ...replica,
          index,
          num_cached_blocks: cached.get(index),
          preempted: sum(frames, ({ frame }) => frame.replicas[index]?.num_preemptions),
          lost: sum(frames, ({ frame }) => frame.replicas[index]?.num_workers_lost),
        },
  );
  const [first, ...others] = REPLICA_COLUMNS;
  const columns = rows.some((row) => row.ranks) ? [first, RANKS, ...others] : REPLICA_COLUMNS;
  return [
    h(
      Card,
      { key: "replicas", title: "Replicas" },
      h(Table, { caption: "Replicas", columns, rows, empty: "The engine has not started yet." }),
    ),
    h(Parts, { key: "stages", title: "Stages", columns: STAGE_COLUMNS, rows: partsOf(rows, "stages") }),
    h(Parts, { key: "groups", title: "KV groups", columns: GROUP_COLUMNS, rows: partsOf(rows, "kv_groups") }),
  ];
}

/** Those of all replicas that have several. */
function partsOf(replicas, name) {
  return replicas.flatMap(({ index, [name]: parts = [] }) =>
    parts.map((part, number) => ({ ...part, replica: index, number })),
  );
}

function Parts({ title, columns, rows }) {
  return rows.length > 0 && h(Card, { title }, h(Table, { caption: title, columns, rows }));
}

const CLASS_COLUMNS = [
  { title: "Class", value: (row) => row.name },
  number("Requests/s", (row) => row.requests_per_s),
  number("Output tokens/s", (row) => row.output_tokens_per_s, formatNumber, "Of sequences that ended"),
  number("TTFT p50", (row) => row.ttft_ns.p50 ?? null, formatDuration),
  number("TTFT p99", (row) => row.ttft_ns.p99 ?? null, formatDuration),
  number("Queue p99", (row) => row.queue_ns.p99 ?? null, formatDuration),
  number("Completed", (row) => row.completed),
  number("Objectives met", (row) => row.met),
  number("Objectives missed", (row) => row.missed),
  number("Deadlines missed", (row) => row.late),
  number("Rejected", (row) => row.rejected),
];

export function Classes({ frames, latest }) {
  if (!latest) return null;
  const rows = Object.entries(latest.frame.classes).map(([name, now]) => {
    const added = (field) => sum(frames, ({ frame }) => frame.classes[name]?.[field]);
    return {
      ...now,
      name,
      completed: added("num_complete"),
      met: added("num_slo_met"),
      missed: added("num_slo_missed"),
      late: added("num_deadlines_missed"),
      rejected: added("num_rejected"),
    };
  });
  return h(
    Card,
    { title: "Service classes" },
    h(
      "p",
      { class: "note" },
      "Counts are since this page was opened, ten minutes at most; the rest is of the last second.",
    ),
    h(Table, {
      caption: "Service classes",
      columns: CLASS_COLUMNS,
      rows,
      empty: "No request has had a class.",
    }),
  );
}

function sum(frames, value) {
  return frames.reduce((all, each) => all + (value(each) ?? 0), 0);
}
