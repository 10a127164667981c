// The list of conversations.

import { element, iconButton } from "./dom.js";

/** Show conversations. Actions: address(conversation), rename(conversation, title), export and delete(conversation). */
export function showConversations(list, conversations, currentId, actions) {
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
    node.replaceChildren(renameForm(conversation, actions, () => node.replaceWith(item(conversation, true, actions))));
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

function renameForm(conversation, actions, cancel) {
  const input = element("input", {
    value: conversation.title,
    maxLength: 200,
    "aria-label": "Title of the conversation",
  });
  let isDone = false;
  const end = (isKept) => {
    if (isDone) return;
    isDone = true;
    if (isKept && input.value.trim()) actions.rename(conversation, input.value.trim());
    else cancel();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    end(false);
  });
  input.addEventListener("blur", () => end(true));
  const onsubmit = (event) => {
    event.preventDefault();
    end(true);
  };
  return element("form", { className: "rename", onsubmit }, input);
}

/** Let the browser save a conversation as a file. */
export function exportConversation(conversation) {
  const data = new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" });
  const url = URL.createObjectURL(data);
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
  element("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
