// Frames as columns, for charts.

/** The sum of the values of an object. */
export function total(counts) {
  return Object.values(counts).reduce((sum, count) => sum + count, 0);
}

/** Of each frame the time at its end, in ns of the run, and a value by name. */
export function columnsOf(frames) {
  const columns = { x: frames.map(({ frame }) => frame.end_ns) };
  const add = (name, value) => (columns[name] = frames.map(value));
  add("generated", ({ frame }) => frame.generation_tokens_per_s);
  add("prompted", ({ frame }) => frame.prompt_tokens_per_s);
  add("arrived", ({ frame }) => frame.requests_per_s);
  add("finished", ({ frame }) => rate(frame, total(frame.finished)));
  add("rejected", (each) => rate(each.frame, rejectedIn(each)));
  add("preempted", ({ frame }) => rate(frame, total(frame.preempted)));
  add("running", ({ frame }) => frame.num_running);
  add("waiting", ({ frame }) => frame.num_waiting);
  add("held", ({ frame }) => frame.num_held_blocks);
  add("blocks", ({ frame }) => frame.num_blocks);
  add("batch", ({ frame }) => frame.batch_size.mean ?? null);
  add("batchTokens", ({ frame }) => frame.batch_tokens.mean ?? null);
  columns.hits = held(frames.map(({ frame }) => frame.hit_percent));
  for (const [name, field] of Object.entries(LATENCIES)) {
    for (const percentile of PERCENTILES) {
      columns[`${name}.${percentile}`] = held(frames.map(({ frame }) => frame[field][percentile] ?? null));
    }
  }
  return columns;
}

export const PERCENTILES = ["p50", "p90", "p99"];
const LATENCIES = {
  ttft: "ttft_ns",
  gap: "inter_token_ns",
  queue: "queue_ns",
  e2e: "e2e_ns",
  step: "step_ns",
};

/** Requests that a frame's interval turned away, for whatever reason. */
export function rejectedIn({ frame, num_rate_limited }) {
  return total(frame.rejected) + num_rate_limited;
}

function rate(frame, count) {
  const seconds = (frame.end_ns - frame.start_ns) / 1e9;
  return seconds ? count / seconds : null;
}

/** With the last value in the place of those that are missing: a second in which nothing was measured changes none. */
function held(values) {
  let last = null;
  return values.map((value) => (last = value ?? last));
}
