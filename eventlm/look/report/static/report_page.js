// The page of a run: tabs of what was found, figures, the timeline, gauges, replicas and requests.

import { h } from "preact";
import { TwoRuns } from "./two_runs.js";
import { Findings } from "./findings.js";
import { OverTime, Replicas } from "./over_time.js";
import { Overview } from "./overview.js";
import { Requests, TimelineTab } from "./requests.js";
import { Notice, Shell } from "./shell.js";
import { WhatIf } from "./what_if.js";

/**
 * The page. data: as `report_data` makes it.
 *
 * moreTabs, moreNotices, actions, onDebug: what a server of the page adds to it. onDebug(commands) runs them in the
 * debugger.
 */
export function ReportPage({ data, moreTabs = [], moreNotices, actions, onDebug }) {
  const tabs = [
    { name: "findings", title: "Findings", count: data.findings.length, draw: () => h(Findings, { data, onDebug }) },
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
    actions,
    tabs: [...tabs, ...moreTabs],
    notices: [moreNotices, ...data.notices.map(({ kind, text }) => h(Notice, { key: text, kind }, text))],
  });
}
