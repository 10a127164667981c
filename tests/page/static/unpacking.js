// Shows what a table of columns holds.

import { h } from "preact";
import { useEffect, useState } from "preact/hooks";
import { unpackColumns } from "./columns.js";
import { start } from "./shell.js";

start((data) => h(Unpacked, { data }));

function Unpacked({ data }) {
  const [text, setText] = useState("");
  const describe = (values) =>
    values.length === undefined ? values : { type: values.constructor.name, values: Array.from(values) };
  useEffect(() => {
    unpackColumns(data).then(
      (table) => setText(JSON.stringify(Object.fromEntries(Object.entries(table).map(([k, v]) => [k, describe(v)])))),
      (error) => setText(String(error)),
    );
  }, []);
  return [h("h1", {}, "Columns"), h("pre", {}, text)];
}
