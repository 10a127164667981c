// A report of the last minutes, as a file: it has scripts of its own, which this page may not run.

import { h } from "preact";
import { useState } from "preact/hooks";
import { readReport } from "./live.js";

const MINUTES = [1, 5, 15, 60];

/** onTrouble(text): why there is no report; empty if there is. */
export function ReportButton({ apiKey, onTrouble }) {
  const [minutes, setMinutes] = useState(5);
  const [busy, setBusy] = useState(false);

  async function download() {
    setBusy(true);
    onTrouble("");
    try {
      save(await readReport(apiKey, minutes), "eventlm-report.html");
    } catch (error) {
      onTrouble(`There is no report: ${error.message}`);
    }
    setBusy(false);
  }

  return [
    h(
      "label",
      { key: "minutes" },
      h("span", { class: "note" }, "Report of the last "),
      h(
        "select",
        { value: minutes, onChange: (event) => setMinutes(Number(event.target.value)) },
        MINUTES.map((each) => h("option", { key: each, value: each, selected: each === minutes }, `${each} min`)),
      ),
    ),
    h(
      "button",
      { key: "report", type: "button", class: "quiet", disabled: busy, onClick: download },
      busy ? "Making a report…" : "Download a report",
    ),
  ];
}

function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  URL.revokeObjectURL(url);
}
