// The conversations that this browser keeps, each under a key of its own.
//
// A conversation is {version, id, title, created, updated, messages}; times are ISO 8601. A message is {role, content};
// an assistant's has also {reasoning, toolCalls, finishReason, error, stats}, a tool's {toolCallId}.

import * as storage from "./storage.js";

/** Of the format. Anything stored in another one is left alone and not shown. */
const VERSION = 1;
const PREFIX = "eventlm.conversation.";
const TITLE_LENGTH = 60;

export class Conversations {
  #byId = new Map();

  /** onChange is called with the id of one that another tab has changed. */
  constructor(onChange) {
    for (const key of storage.keys(PREFIX)) this.#read(key);
    addEventListener("storage", ({ key }) => {
      if (!key?.startsWith(PREFIX)) return;
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
    return { version: VERSION, id: randomId(), title: "", created: now, updated: now, messages: [] };
  }

  /** Throws QuotaExceededError when the storage is full; the conversation is then kept until the page closes. */
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
    const id = key.slice(PREFIX.length);
    const stored = storage.load(key);
    if (stored?.id === id && isConversation(stored)) this.#byId.set(id, stored);
    else this.#byId.delete(id);
  }
}

function isConversation({ version, title, updated, messages }) {
  return version === VERSION && areTexts(title, updated) && Array.isArray(messages) && messages.every(isMessage);
}

function isMessage(message) {
  if (!message || !areTexts(message.role, message.content)) return false;
  if (message.role === "tool") return areTexts(message.toolCallId);
  if (message.role !== "assistant") return true;
  const { reasoning, toolCalls, stats } = message;
  if (!areTexts(reasoning) || !Array.isArray(toolCalls)) return false;
  if (stats && !areNumbers(stats.outputTokens, stats.promptTokens)) return false;
  return toolCalls.every((call) => areTexts(call?.id, call?.name, call?.arguments));
}

function areTexts(...values) {
  return values.every((value) => typeof value === "string");
}

function areNumbers(...values) {
  return values.every((value) => typeof value === "number");
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
