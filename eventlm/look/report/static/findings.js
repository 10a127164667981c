// What is wrong with the run, before anything else.

import { h } from "preact";
import { Card, Figures } from "./cards.js";
import { linkTo } from "./place.js";

/** onDebug(commands): of a page that has the debugger; else findings say what to type in a shell. */
export function Findings({ data, onDebug }) {
  if (data.findings.length === 0) return h(Nothing, { data });
  return data.findings.map((finding, place) => h(Finding, { key: place, finding, data, onDebug }));
}

function Nothing({ data }) {
  const isEmpty = data.timeline.names.length === 0;
  return h(
    Card,
    { title: isEmpty ? "No request arrived" : "Nothing stands out", tone: isEmpty ? "" : "good" },
    h(
      "p",
      {},
      isEmpty
        ? "There is nothing to judge."
        : data.isVerified
          ? "Nobody starved, no work was thrown away, and no limit held the run back. These are its figures."
          : "As far as the log alone shows. These are its figures.",
    ),
    h(Figures, { figures: data.headline }),
  );
}

function Finding({ finding, data, onDebug }) {
  return h(
    Card,
    { title: finding.title, tone: finding.tone, verdict: finding.verdict },
    h("p", {}, finding.text),
    h("p", {}, h("b", {}, `${finding.culpritLabel}: `), h("span", { class: "culprit" }, finding.culprit)),
    h(Figures, { figures: finding.figures }),
    h(
      "div",
      { class: "ways" },
      finding.requests.map(({ row, name }, place) =>
        h(
          "a",
          { key: row, class: "way", href: linkToRequest(name) },
          place === 0 ? `Request ${name} in the timeline` : name,
        ),
      ),
      finding.at !== null && h("a", { class: "way", href: linkToTime(data, finding.at) }, "That time in the timeline"),
      onDebug &&
        finding.debuggerCommands.length > 0 &&
        h(
          "button",
          { type: "button", class: "quiet", onClick: () => onDebug(finding.debuggerCommands) },
          "In the debugger",
        ),
    ),
    finding.commands.map((command) => h(Command, { key: command, command })),
  );
}

/** A line to type. */
export function Command({ command }) {
  return h("code", { class: "command" }, command);
}

/** A request in the timeline. The timeline itself looks for the stretch in which it lived. */
export function linkToRequest(name) {
  return linkTo("timeline", { request: name, near: 1 });
}

/** A fiftieth of the run around a time. */
function linkToTime(data, at) {
  const half = data.end / 100;
  return linkTo("timeline", { from: Math.round(Math.max(0, at - half)), to: Math.round(at + half) });
}
