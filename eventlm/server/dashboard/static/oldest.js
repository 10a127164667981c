// The oldest requests that wait and that run, with why each waits.

import { h } from "preact";
import { Card } from "./cards.js";
import { formatDuration, formatNumber } from "./format.js";
import { Table } from "./table.js";

/** By cause: see `WaitCause` of the core. */
const CAUSES = {
  steps_in_flight: ({ replica }) => `no step has been planned on replica ${replica} since it could run`,
  batcher: () => "the batcher gave its prefill no part of the step",
  token_budget: () => "the step was full with more urgent ones",
  micro_batch: () => "the step was full with its share of more urgent ones that run",
  head_of_line: ({ other }) => `request ${name(other)} goes first and does not fit`,
  trial: ({ other }) => `request ${name(other)} is tried alone, as it may have killed a worker`,
  blocks: ({ replica, num_lacking }) =>
    `replica ${replica} has ${formatNumber(num_lacking)} ${num_lacking === 1 ? "block" : "blocks"} too few`,
  sequence_limit: ({ replica }) => `all sequence slots of replica ${replica} are taken`,
  avoided: ({ replica }, backends) => `it has just failed on ${backendOf(replica, backends)}, and the others have no room`,
  backend_limit: ({ replica }, backends) => `${backendOf(replica, backends)} has as many requests as it may have`,
  worker: () => "no worker is up",
  backend: () => "no backend is up",
  backoff: ({ remaining_ns }) => `an attempt has failed, and the next one is due in ${formatDuration(remaining_ns)}`,
  paused: () => "an operator has paused the engine",
  draining: () => "it was preempted, and steps of it are still in flight",
  grammar: () => "its grammar is being built",
  text_end: () => "the end of its text is being looked for",
};

/** Why a sequence waits, as a clause. One without a reason has just been taken into a step. backends: names by replica. */
export function describeWait(wait, backends) {
  if (!wait) return "it is in a step";
  return CAUSES[wait.cause]?.(wait, backends) ?? wait.cause;
}

/** The names of backends by replica, of the latest frame. */
export function backendNames(latest) {
  return latest?.frame.replicas.map(({ backend }) => backend?.name) ?? [];
}

function backendOf(replica, backends) {
  return `backend ${backends[replica] ?? replica}`;
}

function name(other) {
  return other ? nameOf({ request: other[0], index: other[1] }) : "another";
}

/** A sequence: its request, and which sample it is, if not the first. */
export function nameOf({ request, index }) {
  return index ? `${request}.${index}` : String(request);
}

const REQUEST = { title: "Request", value: nameOf, note: "The number of its arrival in the trace" };
const AGE = { title: "Age", value: (row) => row.age_ns, format: formatDuration, number: true };
const CLASS = { title: "Class", value: (row) => row.service_class || "–" };
const PRIORITY = { title: "Priority", value: (row) => row.priority, number: true };
const PROMPT = { title: "Prompt", value: (row) => row.prompt_tokens, format: formatNumber, number: true };
const OUTPUT = { title: "Output", value: (row) => row.output_tokens, format: formatNumber, number: true };
const RESTARTS = { title: "Restarts", value: (row) => row.num_restarts, number: true };
const BLOCKS = { title: "Blocks", value: (row) => row.num_blocks, format: formatNumber, number: true };

export function OldestTables({ oldest, latest }) {
  if (!oldest) return h("p", { class: "note" }, "The requests are on their way.");
  const backends = backendNames(latest);
  const WHY = { title: "Why it waits", value: (row) => describeWait(row.wait, backends) };
  const LEFT_OUT = {
    title: "In no step because",
    value: (row) => (row.wait ? describeWait(row.wait, backends) : "–"),
  };
  const WHERE = backends.some(Boolean)
    ? { title: "Where", value: (row) => backends[row.replica] ?? `replica ${row.replica}` }
    : { title: "Replica", value: (row) => row.replica, number: true };
  return [
    h(
      Card,
      { key: "waiting", title: "Waiting longest" },
      h(Table, {
        caption: "Requests that wait",
        columns: [REQUEST, AGE, WHY, CLASS, PRIORITY, PROMPT, OUTPUT, RESTARTS],
        rows: oldest.waiting,
        empty: "Nothing waits.",
      }),
    ),
    h(
      Card,
      { key: "running", title: "Running longest" },
      h(Table, {
        caption: "Requests that run",
        columns: [REQUEST, AGE, WHERE, PROMPT, OUTPUT, BLOCKS, CLASS, PRIORITY, RESTARTS, LEFT_OUT],
        rows: oldest.running,
        empty: "Nothing runs.",
      }),
    ),
  ];
}
