// Tables whose columns can be sorted.

import { h } from "preact";
import { useMemo, useState } from "preact/hooks";

const MOST_ROWS_AT_FIRST = 50;

/**
 * A table.
 *
 * caption: says what it is. columns: [{title, value(row), format(value), number, note}]; `value` is what is sorted by,
 * and `format` makes a text of it; `number` aligns at the right. rows: objects, in the order at first.
 * onSelect(row): the first column becomes a button; selected: the row that is marked. sort: {column, descending}.
 */
export function Table({ caption, columns, rows, onSelect, selected, sort: sortedAtFirst = null, empty = "None." }) {
  const [sort, setSort] = useState(sortedAtFirst);
  const [most, setMost] = useState(MOST_ROWS_AT_FIRST);
  const sorted = useMemo(
    () => (sort ? sortRows(rows, columns[sort.column].value, sort.descending) : rows),
    [rows, sort],
  );
  if (rows.length === 0) return h("p", { class: "note" }, empty);

  function sortBy(column) {
    // Of numbers the largest are looked for, of names the first.
    const descending = sort?.column === column ? !sort.descending : Boolean(columns[column].number);
    setSort({ column, descending });
  }

  return h(
    "div",
    { class: "table", role: "region", "aria-label": caption, tabIndex: 0 },
    h(
      "table",
      {},
      h("caption", { class: "off-screen" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map((column, number) => {
            const direction = sort?.column === number ? (sort.descending ? "descending" : "ascending") : null;
            return h(
              "th",
              { key: column.title, scope: "col", class: column.number ? "right" : "", "aria-sort": direction },
              h("button", { type: "button", onClick: () => sortBy(number), title: column.note }, column.title),
            );
          }),
        ),
      ),
      h(
        "tbody",
        {},
        sorted.slice(0, most).map((row, place) =>
          h(
            "tr",
            { key: place, class: row === selected ? "selected" : "" },
            columns.map((column, number) => {
              const value = column.value(row);
              const text = column.format ? column.format(value) : String(value ?? "–");
              const opens = number === 0 && onSelect;
              return h(
                number === 0 ? "th" : "td",
                { key: column.title, scope: number === 0 ? "row" : undefined, class: column.number ? "right" : "" },
                opens
                  ? h(
                      "button",
                      {
                        type: "button",
                        class: "link",
                        "aria-pressed": String(row === selected),
                        onClick: () => onSelect(row),
                      },
                      text,
                    )
                  : text,
              );
            }),
          ),
        ),
      ),
    ),
    sorted.length > most &&
      h(
        "p",
        { class: "more" },
        h("span", { class: "note" }, `${most} of ${sorted.length.toLocaleString("en")} rows`),
        h("button", { type: "button", class: "quiet", onClick: () => setMost(most * 4) }, "Show more"),
      ),
  );
}

/** Sorted by a value, rows that have none last, and equal ones in the order that they had. */
function sortRows(rows, value, descending) {
  const sign = descending ? -1 : 1;
  const missing = (each) => each === null || each === undefined || Number.isNaN(each);
  const keyed = rows.map((row) => [value(row), row]);
  keyed.sort(([one], [other]) => {
    if (missing(one) || missing(other)) return missing(one) - missing(other);
    if (typeof one === "string" && typeof other === "string")
      return sign * one.localeCompare(other, "en", { numeric: true });
    return sign * (one < other ? -1 : one > other ? 1 : 0);
  });
  return keyed.map(([, row]) => row);
}
