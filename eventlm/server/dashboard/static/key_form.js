// The question for a key.

import { h } from "preact";
import { useRef } from "preact/hooks";
import { Card } from "./cards.js";
import { Notice } from "./shell.js";

/** refusal: why the last key was not taken. onKey(key): the reader has given one. */
export function KeyForm({ refusal, onKey }) {
  const field = useRef(null);

  function submit(event) {
    // The key goes into a header; nothing is sent by the form.
    event.preventDefault();
    onKey(field.current.value.trim());
  }

  return h(
    "main",
    { class: "entrance" },
    h("h1", {}, "eventlm dashboard"),
    refusal && h(Notice, { kind: "error" }, refusal),
    h(
      Card,
      { title: "Key" },
      h(
        "form",
        { onSubmit: submit },
        h("label", { for: "key" }, "API key with the scope admin"),
        h("input", {
          id: "key",
          ref: field,
          type: "password",
          autocomplete: "off",
          required: true,
          "aria-describedby": "key-note",
        }),
        h("button", { type: "submit", class: "primary" }, "Open"),
      ),
      h("p", { class: "note", id: "key-note" }, "It stays in the memory of this page and is forgotten with it."),
    ),
  );
}
