// What the user has set, kept in this browser. null and "" mean the server's default.

import * as storage from "./storage.js";

const KEY = "eventlm.settings";
const DEFAULTS = {
  apiKey: "",
  model: "",
  systemPrompt: "",
  temperature: null,
  topP: null,
  maxTokens: null,
  seed: null,
  moreParameters: "",
  showReasoning: true,
};

export function loadSettings() {
  const stored = storage.load(KEY) ?? {};
  const readable = Object.entries(DEFAULTS).filter(([name, value]) => isReadable(name, stored[name], value));
  return { ...DEFAULTS, ...Object.fromEntries(readable.map(([name]) => [name, stored[name]])) };
}

/** Whether a stored value is one that the dialog could have saved. */
function isReadable(name, stored, byDefault) {
  if (name === "moreParameters") return typeof stored === "string" && !problemOfMoreParameters(stored);
  return typeof stored === (byDefault === null ? "number" : typeof byDefault);
}

export function saveSettings(settings) {
  storage.save(KEY, settings);
}

/** The default settings, with the key and the model of the current ones. */
export function resetSettings({ apiKey, model }) {
  return { ...DEFAULTS, apiKey, model };
}

/** What is wrong with the text of further parameters; empty if nothing is. */
export function problemOfMoreParameters(text) {
  try {
    parseMoreParameters(text);
    return "";
  } catch (error) {
    return error.message;
  }
}

/** An object of further fields of the request's body. Throws an Error that says what is wrong. */
export function parseMoreParameters(text) {
  if (!text.trim()) return {};
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
  if (value === null || typeof value !== "object" || Array.isArray(value)) {
    throw new Error('This must be a JSON object, such as {"top_k": 20}.');
  }
  return value;
}
