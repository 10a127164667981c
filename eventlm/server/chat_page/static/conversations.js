// The conversations that this browser keeps, each under a key of its own.
//
// A conversation is {id, title, created, updated, messages}; times are ISO 8601. A message is {role, content}; an
// assistant's has also {reasoning, toolCalls, finishReason, error, stats}, a tool's {toolCallId}.

import * as storage from "./storage.js";

const PREFIX = "eventlm.conversation.";
const TITLE_LENGTH = 60;

export class Conversations {
  #byId = new Map();

  /** onChange is called when another tab has changed one. */
  constructor(onChange) {
    for (const key of storage.keys(PREFIX)) this.#read(key);
    addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(PREFIX)) return;
      this.#byId.delete(key.slice(PREFIX.length));
      this.#read(key);
      onChange(key.slice(PREFIX.length));
    });
  }

  /** All, the last changed one first. */
  list() {
    return [...this.#byId.values()].sort((a, b) => b.updated.localeCompare(a.updated));
  }

  get(id) {
    return this.#byId.get(id);
  }

  /** A new one, not kept until it is saved. */
  create() {
    const now = new Date().toISOString();
    return { id: randomId(), title: "", created: now, updated: now, messages: [] };
  }

  /** Throws QuotaExceededError when the browser has no room; until the page is left it is kept all the same. */
  save(conversation) {
    conversation.updated = new Date().toISOString();
    this.restore(conversation);
  }

  /** Save one as it is, such as one that was deleted. */
  restore(conversation) {
    this.#byId.set(conversation.id, conversation);
    storage.save(PREFIX + conversation.id, conversation);
  }

  delete(id) {
    this.#byId.delete(id);
    storage.remove(PREFIX + id);
  }

  #read(key) {
    const conversation = storage.load(key);
    if (Array.isArray(conversation?.messages) && PREFIX + conversation.id === key) {
      this.#byId.set(conversation.id, conversation);
    }
  }
}

/** A title made of the beginning of the first message. */
export function titleOf(text) {
  const [line] = text.trim().split("\n");
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line;
}

/** crypto.randomUUID is missing where the page comes over plain HTTP from another machine. */
function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
