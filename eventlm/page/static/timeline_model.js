// The data of a timeline, the order of its rows, and what is at a place.

import { unpackColumns } from "./columns.js";
import { PHASES } from "./phases.js";

/** Unpack what timeline.py packed. */
export async function unpackTimeline(packed) {
  const [requests, intervals, steps, marks] = await Promise.all(
    [packed.requests, packed.intervals, packed.steps, packed.marks].map(unpackColumns),
  );
  const lanes = packed.lanes && lanesOf(await unpackColumns(packed.lanes), packed.laneNames, packed.laneNouns);
  // Where a step interval ends on an axis of steps.
  const lastEnd = intervals.last.map((last) => last + 1);
  let stepsEnd = 1;
  for (const end of lastEnd) if (end > stepsEnd) stepsEnd = end;
  const firstOfReplica = new Map();
  for (let row = 0; row < steps.rows; row++) {
    if (!firstOfReplica.has(steps.replica[row])) firstOfReplica.set(steps.replica[row], row);
  }
  return {
    names: packed.names,
    classes: packed.classes,
    requests,
    intervals,
    steps,
    marks,
    lanes: lanes ?? null,
    firstInterval: firstRows(intervals.request, requests.rows),
    firstOfReplica,
    axes: {
      time: { start: intervals.start, end: intervals.end, last: Math.max(1, packed.end), least: 1000 },
      steps: { start: intervals.first, end: lastEnd, last: stepsEnd, least: 1 },
    },
  };
}

/**
 * The lanes of stages, KV groups and backends. columns: a row for each step in each. free: since when a lane could
 * begin a step that was there before; until then the step waits, and from then to its start it is exchanged. `steps`
 * and `waits` are what `paint` takes.
 */
function lanesOf(columns, names, nouns) {
  const { rows, lane, phase, start, end, came, tokens, most } = columns;
  const free = new Float64Array(rows);
  const steps = { phase: new Int32Array(2 * rows), start: new Float64Array(2 * rows), end: new Float64Array(2 * rows) };
  const waits = { phase: new Int32Array(rows), start: came, end: free };
  const phases = new Set(phase);
  const exchange = PHASES.findIndex(({ name }) => name === "exchange");
  for (let row = 0; row < rows; row++) {
    const before = row > 0 && lane[row - 1] === lane[row] ? end[row - 1] : 0;
    free[row] = Math.max(came[row], Math.min(before, start[row]));
    if (free[row] > came[row]) phases.add(0);
    if (start[row] > free[row]) phases.add(exchange);
    steps.phase.set([exchange, phase[row]], 2 * row);
    steps.start.set([free[row], start[row]], 2 * row);
    // A group that has less of a step than another has it for a shorter time.
    const share = most[row] ? tokens[row] / most[row] : 1;
    steps.end.set([start[row], start[row] + (end[row] - start[row]) * share], 2 * row);
  }
  const first = firstRows(lane, names.length);
  const all = Int32Array.from({ length: names.length + 1 }, (_, number) => number);
  const model = (intervals, perRow) => ({ intervals, firstInterval: first.map((each) => each * perRow), axes: {} });
  return {
    names,
    nouns,
    columns,
    free,
    first,
    phases,
    order: { rows: names.length, starts: all, requests: all },
    steps: model(steps, 2),
    waits: model(waits, 1),
  };
}

/** For ascending numbers, where each begins: `rows + 1` places. */
function firstRows(numbers, rows) {
  const first = new Int32Array(rows + 1);
  for (const number of numbers) first[number + 1]++;
  for (let row = 0; row < rows; row++) first[row + 1] += first[row];
  return first;
}

/**
 * Rows of a timeline: those of row r are `requests[starts[r]]` up to `requests[starts[r + 1]]`, and `rowOf` is the row
 * of each request. groups: [{label, first, end}], rows that belong together.
 * by: "arrival", "replica", "class" or "slot", where requests that did not overlap share a row.
 */
export function orderRows(model, by) {
  const { requests } = model;
  const all = Int32Array.from({ length: requests.rows }, (_, index) => index);
  all.sort((one, other) => requests.arrived[one] - requests.arrived[other] || one - other);
  if (by === "arrival") return rowsOf(all, null, null);
  const keys = { replica: requests.replica, class: requests.class, slot: null }[by] ?? slots(model, all);
  all.sort((one, other) => keys[one] - keys[other] || requests.arrived[one] - requests.arrived[other] || one - other);
  if (by === "slot") return rowsOf(all, keys, null);
  const label =
    by === "class" ? (code) => model.classes[code] : (code) => (code < 0 ? "no replica" : `replica ${code}`);
  return rowsOf(all, null, (request) => label(keys[request]));
}

function rowsOf(all, shared, labelOf) {
  const starts = [];
  const rowOf = new Int32Array(all.length);
  const groups = [];
  all.forEach((request, place) => {
    if (!shared || place === 0 || shared[request] !== shared[all[place - 1]]) starts.push(place);
    rowOf[request] = starts.length - 1;
    const label = labelOf?.(request);
    if (label !== undefined && groups.at(-1)?.label !== label) groups.push({ label, first: starts.length - 1, end: 0 });
    if (groups.length) groups.at(-1).end = starts.length;
  });
  return { rows: starts.length, starts: Int32Array.from([...starts, all.length]), requests: all, rowOf, groups };
}

/** As the run numbered them, or the lowest that is free when a request arrives. */
function slots({ requests }, byArrival) {
  if (requests.slot) return requests.slot;
  const slot = new Int32Array(requests.rows);
  const busy = new Heap((one, other) => requests.ended[one] - requests.ended[other]);
  const free = new Heap((one, other) => one - other);
  let count = 0;
  for (const request of byArrival) {
    while (busy.size && requests.ended[busy.first] <= requests.arrived[request]) free.push(slot[busy.pop()]);
    slot[request] = free.size ? free.pop() : count++;
    busy.push(request);
  }
  return slot;
}

/** Gives the least of what it holds first. */
class Heap {
  constructor(compare) {
    this.compare = compare;
    this.items = [];
  }

  get size() {
    return this.items.length;
  }

  get first() {
    return this.items[0];
  }

  push(item) {
    const { items } = this;
    let place = items.length;
    while (place > 0) {
      const above = (place - 1) >> 1;
      if (this.compare(items[above], item) <= 0) break;
      items[place] = items[above];
      place = above;
    }
    items[place] = item;
  }

  pop() {
    const { items } = this;
    const [least] = items;
    const item = items.pop();
    if (!items.length) return least;
    let place = 0;
    for (;;) {
      let below = 2 * place + 1;
      if (below >= items.length) break;
      if (below + 1 < items.length && this.compare(items[below + 1], items[below]) < 0) below++;
      if (this.compare(items[below], item) >= 0) break;
      items[place] = items[below];
      place = below;
    }
    items[place] = item;
    return least;
  }
}

/** The first place from `low` below `high` whose value is at least `value`; `high` if there is none. */
export function lowerBound(values, value, low, high) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * What is shown in rows `first` up to `end`, from x `start` to `stop` on an axis.
 * Gives the first interval, the one request or how many there are, and how many are in each phase.
 */
export function whatIsAt(model, order, axis, first, end, start, stop) {
  const counts = new Map();
  let interval = -1;
  let requests = 0;
  for (let place = order.starts[first]; place < order.starts[end]; place++) {
    const request = order.requests[place];
    let seen = false;
    for (let each = model.firstInterval[request]; each < model.firstInterval[request + 1]; each++) {
      if (axis.start[each] >= stop || axis.end[each] <= start) continue;
      if (interval < 0) interval = each;
      if (!seen) counts.set(model.intervals.phase[each], (counts.get(model.intervals.phase[each]) ?? 0) + 1);
      seen = true;
    }
    requests += seen;
  }
  return { interval, requests, counts };
}
