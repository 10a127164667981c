// What takes a moment to unpack: once, when it is first looked at.

import { useEffect, useState } from "preact/hooks";
import { unpackColumns } from "./columns.js";
import { unpackTimeline } from "./timeline_model.js";

const started = new Map();

/** What `load()` gives, or null until it is there. Shared by all that ask for the same name. */
function useLoaded(name, load) {
  const [value, setValue] = useState(null);
  const [failure, setFailure] = useState(null);
  useEffect(() => {
    if (!started.has(name)) started.set(name, load());
    started.get(name).then((found) => setValue(() => found), setFailure);
  }, [name]);
  if (failure) throw failure;
  return value;
}

/** {timeline, requests, stretches}, unpacked. */
export function useRun(data) {
  return useLoaded("run", async () => {
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
  return useLoaded("series", async () => {
    const [gauges, rates] = await Promise.all([data.series.gauges, data.series.rates].map(unpackColumns));
    return { gauges, rates };
  });
}
