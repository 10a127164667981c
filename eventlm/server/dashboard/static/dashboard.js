// The dashboard of a running server. The page itself has no data: it asks for a key and reads with it.

import { h } from "preact";
import { useMemo, useState } from "preact/hooks";
import { Classes, Replicas } from "./fleet.js";
import { formatNumber } from "./format.js";
import { columnsOf } from "./frames.js";
import { KeyForm } from "./key_form.js";
import { useFrames, useOldest } from "./live.js";
import { OldestTables } from "./oldest.js";
import { Overview } from "./overview.js";
import { ReportButton } from "./report_button.js";
import { Notice, Shell, start } from "./shell.js";

/** Events that are not written yet, of which a reader should know. */
const MANY_BEHIND = 10_000;

function Dashboard() {
  // In memory only: a key of an operator outlives neither the page nor a reload.
  const [key, setKey] = useState(null);
  const [refusal, setRefusal] = useState("");

  function ask(refusal) {
    setKey(null);
    setRefusal(refusal);
  }

  if (key === null) return h(KeyForm, { refusal, onKey: setKey });
  return h(Live, { apiKey: key, onRefused: ask, onLeave: () => ask("") });
}

function Live({ apiKey, onRefused, onLeave }) {
  const { frames, trouble } = useFrames(apiKey, onRefused);
  const { oldest, oldestTrouble } = useOldest(apiKey, onRefused);
  const [reportTrouble, setReportTrouble] = useState("");
  const columns = useMemo(() => columnsOf(frames), [frames]);
  const latest = frames.at(-1);
  const views = { frames, columns, latest, oldest };
  const waiting = latest?.frame.num_waiting;
  return h(Shell, {
    title: "eventlm dashboard",
    details: [location.host, oldest && `policy ${oldest.policy}`, latest && recordingOf(latest)],
    actions: [
      h(ReportButton, { key: "report", apiKey, onTrouble: setReportTrouble }),
      h("button", { key: "leave", type: "button", class: "quiet", onClick: onLeave }, "Forget the key"),
    ],
    notices: [trouble, oldestTrouble, reportTrouble]
      .filter(Boolean)
      .map((text) => h(Notice, { key: text, kind: "warning" }, text)),
    tabs: [
      { name: "overview", title: "Overview", draw: () => h(Overview, views) },
      { name: "requests", title: "Requests", count: waiting || undefined, draw: () => h(OldestTables, views) },
      { name: "replicas", title: "Replicas", draw: () => h(Replicas, views) },
      { name: "classes", title: "Classes", draw: () => h(Classes, views) },
    ],
  });
}

function recordingOf({ is_recording, num_events_behind }) {
  if (!is_recording) return "not recording";
  return num_events_behind < MANY_BEHIND ? "recording" : `recording, ${formatNumber(num_events_behind)} events behind`;
}

start(() => h(Dashboard));
