// The report of a run.

import { h } from "preact";
import { TwoRuns } from "./two_runs.js";
import { Findings } from "./findings.js";
import { OverTime, Replicas } from "./over_time.js";
import { Overview } from "./overview.js";
import { Requests, TimelineTab } from "./requests.js";
import { Notice, Shell, start } from "./shell.js";
import { WhatIf } from "./what_if.js";

start((data) => h(Report, { data }));

function Report({ data }) {
  const tabs = [
    { name: "findings", title: "Findings", count: data.findings.length, draw: () => h(Findings, { data }) },
    { name: "overview", title: "Overview", draw: () => h(Overview, { data }) },
    { name: "timeline", title: "Timeline", draw: () => h(TimelineTab, { data }) },
    { name: "time", title: "Over time", draw: () => h(OverTime, { data }) },
    { name: "replicas", title: "Replicas", draw: () => h(Replicas, { data }) },
    { name: "requests", title: "Requests", draw: () => h(Requests, { data }) },
  ];
  if (data.whatIf) tabs.push({ name: "what-if", title: "What if", draw: () => h(WhatIf, { found: data.whatIf }) });
  if (data.pair) tabs.push({ name: "two-runs", title: "Two runs", draw: () => h(TwoRuns, { found: data.pair }) });
  return h(Shell, {
    title: data.title,
    details: data.details,
    tabs,
    notices: data.notices.map(({ kind, text }) => h(Notice, { key: text, kind }, text)),
  });
}
