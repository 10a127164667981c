// Shows which slots requests get.

import { h } from "preact";
import { start } from "./shell.js";
import { orderRows } from "./timeline_model.js";

start((requests) => [
  h("h1", {}, "Slots"),
  h("pre", {}, JSON.stringify([...orderRows({ requests }, "slot").rowOf])),
]);
