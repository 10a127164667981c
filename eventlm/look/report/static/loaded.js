// What takes a moment to unpack: once, when it is first looked at.

import { useEffect, useState } from "preact/hooks";
import { unpackColumns } from "./columns.js";
import { unpackTimeline } from "./timeline_model.js";

/** By the data of a run: what is unpacked of it, by name. */
const started = new WeakMap();

/** What `load()` gives, or null until it is there; of newer data the old until then. Shared by all that ask for it. */
function useLoaded(data, name, load) {
  const [value, setValue] = useState(null);
  const [failure, setFailure] = useState(null);
  useEffect(() => {
    if (!started.has(data)) started.set(data, new Map());
    const names = started.get(data);
    if (!names.has(name)) names.set(name, load());
    names.get(name).then((found) => setValue(() => found), setFailure);
  }, [data, name]);
  if (failure) throw failure;
  return value;
}

/** {timeline, requests, stretches}, unpacked. */
export function useRun(data) {
  return useLoaded(data, "run", async () => {
    const [timeline, requests, stretches] = await Promise.all([
      unpackTimeline(data.timeline),
      unpackColumns(data.requests),
      unpackColumns(data.stretches),
    ]);
    return { timeline, requests, stretches };
  });
}

/** {gauges, rates}, unpacked. */
export function useSeries(data) {
  return useLoaded(data, "series", async () => {
    const [gauges, rates] = await Promise.all([data.series.gauges, data.series.rates].map(unpackColumns));
    return { gauges, rates };
  });
}
