// A page with a timeline only.

import { h } from "preact";
import { useEffect, useState } from "preact/hooks";
import { start } from "./shell.js";
import { Timeline } from "./timeline.js";
import { unpackTimeline } from "./timeline_model.js";

start((data) => h(Page, { data }));

function Page({ data }) {
  const [model, setModel] = useState(null);
  useEffect(() => void unpackTimeline(data.timeline).then(setModel), []);
  return model && h("main", {}, h(Timeline, { model }));
}
