// The list of conversations.

import { element, iconButton, onKey } from "./dom.js";

/**
 * Show conversations, but not while a title is being written. Actions: address(conversation), rename(conversation,
 * title), where the title is null if it stays, export and delete(conversation).
 */
export function showConversations(list, conversations, currentId, actions) {
  if (list.querySelector(".rename")) return;
  list.replaceChildren(...conversations.map((each) => item(each, each.id === currentId, actions)));
}

function item(conversation, isCurrent, actions) {
  const title = conversation.title || "Untitled";
  const link = element(
    "a",
    { href: actions.address(conversation), title, ...(isCurrent && { "aria-current": "page" }) },
    title,
  );
  if (!isCurrent) return element("li", {}, link);
  const node = element("li", { className: "current" }, link);
  const rename = () => {
    node.replaceChildren(titleField(conversation, actions));
    node.querySelector("input").select();
  };
  node.append(
    element(
      "div",
      { className: "item-actions" },
      iconButton("edit", "Rename this conversation", rename),
      iconButton("export", "Export this conversation as JSON", () => actions.export(conversation)),
      iconButton("delete", "Delete this conversation", () => actions.delete(conversation)),
    ),
  );
  return node;
}

function titleField(conversation, actions) {
  const input = element("input", {
    className: "rename",
    value: conversation.title,
    maxLength: 200,
    "aria-label": "Title of the conversation",
  });
  let isOver = false;
  const end = (title) => {
    // A field that is removed loses the focus, which would end it again.
    if (isOver) return;
    isOver = true;
    input.remove();
    actions.rename(conversation, title);
  };
  onKey(input, "Escape", (event) => {
    event.stopPropagation();
    end(null);
  });
  onKey(input, "Enter", () => end(input.value.trim()));
  input.addEventListener("blur", () => end(input.value.trim()));
  return input;
}

/** Let the browser save a conversation as a file. */
export function exportConversation(conversation) {
  const data = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(data);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  element("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
