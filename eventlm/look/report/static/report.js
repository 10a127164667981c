// The report of a run, in one file.

import { h } from "preact";
import { ReportPage } from "./report_page.js";
import { start } from "./shell.js";

start((data) => h(ReportPage, { data }));
