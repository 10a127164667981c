// The page: which conversation is shown, what runs, and what the buttons do.

import { listModels } from "./api.js";
import { Conversations, titleOf } from "./conversations.js";
import { element, growWithText, icon, sendOnEnter } from "./dom.js";
import { describeError } from "./errors.js";
import { Generation } from "./generation.js";
import { loadSettings, saveSettings } from "./settings.js";
import { SettingsDialog } from "./settings_dialog.js";
import { exportConversation, showConversations } from "./sidebar.js";
import * as storage from "./storage.js";
import { Transcript } from "./transcript.js";

const SAVE_EVERY_MS = 2000;
const TOAST_MS = 8000;
const THEMES = ["system", "light", "dark"];

const find = (id) => document.getElementById(id);
const composerText = find("composer-text");
const fitComposer = growWithText(composerText);

let settings = loadSettings();
let models = [];
let current;
/** The replies under way by the ids of their conversations. */
const running = new Map();

const conversations = new Conversations((id) => {
  if (running.has(id)) return;
  if (id === current.id) show(conversations.get(id) ?? conversations.create());
  else showState();
});
const transcript = new Transcript({ again, edit, answerCalls, enterKey: () => dialog.open(settings, "apiKey") });
const dialog = new SettingsDialog(changeSettings, deleteAll);

// Conversations

function show(conversation) {
  current = conversation;
  transcript.show(conversation, running.get(conversation.id)?.message);
  document.body.classList.toggle("is-empty", !conversation.messages.length);
  showState();
}

/** Everything but the messages. */
function showState() {
  const isRunning = running.has(current.id);
  document.title = current.title ? `${current.title} · eventlm` : "eventlm";
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
  showConversations(find("conversations"), conversations.list(), current.id, {
    address: ({ id }) => `#${id}`,
    rename(conversation, title) {
      conversation.title = title;
      keep(() => conversations.restore(conversation));
      showState();
    },
    export: exportConversation,
    delete: deleteOne,
  });
}

/** The conversation that the address names, or a new one. */
function followAddress() {
  const id = location.hash.slice(1);
  show(running.get(id)?.conversation ?? conversations.get(id) ?? conversations.create());
  closeOverlay();
  focusComposer();
}

function startNew() {
  if (location.hash) location.hash = "";
  else followAddress();
}

function save(conversation) {
  keep(() => conversations.save(conversation));
}

function keep(write) {
  try {
    write();
  } catch {
    notify("The browser has no room for more. Export or delete conversations, or changes are lost with the page.");
  }
}

function deleteOne(conversation) {
  removeAll([conversation], `Deleted “${conversation.title}”.`);
}

function deleteAll() {
  removeAll(conversations.list(), "Deleted all conversations.");
}

function removeAll(removed, text) {
  for (const { id } of removed) {
    running.get(id)?.stop();
    conversations.delete(id);
  }
  startNew();
  toast(text, "Undo", () => {
    for (const each of removed) keep(() => conversations.restore(each));
    showState();
  });
}

// Replies

async function send(text) {
  if (running.has(current.id) || !text.trim()) return false;
  if (!models.length) await findModels();
  if (!models.length) return false;
  if (!current.messages.length) current.title = titleOf(text);
  current.messages.push({ role: "user", content: text });
  generate(current);
  return true;
}

async function generate(conversation) {
  let frame = 0;
  let savedAt = Date.now();
  const generation = new Generation(conversation, settings, () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      transcript.refresh(generation.message);
    });
    if (Date.now() - savedAt > SAVE_EVERY_MS) {
      savedAt = Date.now();
      save(conversation);
    }
  });
  running.set(conversation.id, generation);
  save(conversation);
  // So that a reload shows it again, without an entry in the history.
  if (current === conversation) history.replaceState(null, "", `#${conversation.id}`);
  show(conversation);
  await generation.run();
  running.delete(conversation.id);
  cancelAnimationFrame(frame);
  if (!conversations.get(conversation.id)) return;
  save(conversation);
  if (current === conversation) transcript.settle(generation.message);
  showState();
  // An error is read out by itself.
  find("announcement").textContent = generation.message.error ? "" : "The reply is complete.";
}

/** Generate the last reply again. */
function again() {
  if (running.has(current.id)) return;
  if (current.messages.at(-1).role === "assistant") current.messages.pop();
  generate(current);
  focusComposer();
}

function edit(message, text) {
  if (running.has(current.id)) return;
  const index = current.messages.indexOf(message);
  current.messages.splice(index, Infinity, { ...message, content: text });
  if (index === 0) current.title = titleOf(text);
  generate(current);
  focusComposer();
}

function answerCalls(results) {
  for (const [toolCallId, content] of results) current.messages.push({ role: "tool", toolCallId, content });
  generate(current);
  focusComposer();
}

/** On a touch screen that would open the keyboard over the page. */
function focusComposer() {
  if (!matchMedia("(pointer: coarse)").matches) composerText.focus();
}

// Models and settings

async function findModels() {
  try {
    models = await listModels(settings.apiKey);
    notify("");
  } catch (error) {
    models = [];
    const { title, detail, needsKey } = describeError(error, settings.apiKey);
    notify(`${title} ${detail}`, needsKey ? "Enter API key" : "Try again", () => {
      if (needsKey) dialog.open(settings, "apiKey");
      else findModels();
    });
  }
  showModels();
}

function showModels() {
  const picker = find("model");
  const names = models.map(({ id }) => id);
  if (names.length && !names.includes(settings.model)) settings.model = names[0];
  picker.replaceChildren(
    ...names.map((name) => element("option", { value: name, selected: name === settings.model }, name)),
  );
  if (!names.length) picker.append(element("option", {}, "No model"));
  picker.disabled = !names.length;
  const context = models.find(({ id }) => id === settings.model)?.max_model_len;
  picker.title = context ? `Context of ${context.toLocaleString("en")} tokens` : "";
  find("welcome-title").textContent = names.length ? `Talk to ${settings.model}` : "Talk to the model";
}

function changeSettings(changed) {
  const hasOtherKey = changed.apiKey !== settings.apiKey;
  settings = changed;
  keep(() => saveSettings(settings));
  document.body.classList.toggle("hides-reasoning", !settings.showReasoning);
  if (hasOtherKey || !models.length) findModels();
  else showModels();
}

// Messages to the user

function notify(text, label, act) {
  const notice = find("notice");
  notice.hidden = !text;
  notice.replaceChildren(
    ...(text ? [element("p", {}, text), button(label ?? "Dismiss", act ?? (() => notify("")))] : []),
  );
}

let toastTimer = 0;

function toast(text, label, act) {
  const node = find("toast");
  const close = () => node.replaceChildren();
  node.replaceChildren(
    element("p", {}, text),
    button(label, () => {
      close();
      act();
    }),
  );
  clearTimeout(toastTimer);
  toastTimer = setTimeout(close, TOAST_MS);
}

function button(label, onclick) {
  return element("button", { type: "button", className: "quiet", onclick }, label);
}

// Theme and sidebar

function showTheme() {
  const theme = document.documentElement.dataset.theme;
  const label = { system: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" }[theme];
  find("theme").replaceChildren(icon(theme));
  find("theme").setAttribute("aria-label", label);
  find("theme").title = label;
}

function changeTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  document.documentElement.dataset.theme = theme;
  // theme.js reads it before there are modules.
  keep(() => storage.save("eventlm.theme", theme));
  showTheme();
}

/** On a narrow screen the sidebar lies over the page. */
const isNarrow = matchMedia("(max-width: 48rem)");

function toggleSidebar(isShown) {
  document.body.classList.toggle("shows-sidebar", isShown);
  find("sidebar").inert = !isShown;
  find("toggle-sidebar").setAttribute("aria-expanded", isShown);
}

function closeOverlay() {
  if (!isNarrow.matches || !document.body.classList.contains("shows-sidebar")) return;
  toggleSidebar(false);
  find("toggle-sidebar").focus();
}

// Events

find("composer").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = composerText.value;
  if (!(await send(text))) return;
  composerText.value = "";
  fitComposer();
});
sendOnEnter(composerText, () => find("composer").requestSubmit());
find("stop").onclick = () => {
  running.get(current.id)?.stop();
  focusComposer();
};
find("new-conversation").onclick = startNew;
find("open-settings").onclick = () => dialog.open(settings);
find("theme").onclick = changeTheme;
find("toggle-sidebar").onclick = () => {
  toggleSidebar(!document.body.classList.contains("shows-sidebar"));
  if (isNarrow.matches) find("new-conversation").focus();
};
find("backdrop").onclick = closeOverlay;
find("model").onchange = ({ target }) => changeSettings({ ...settings, model: target.value });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (isNarrow.matches && document.body.classList.contains("shows-sidebar")) closeOverlay();
  else running.get(current.id)?.stop();
});
addEventListener("hashchange", followAddress);
addEventListener("pagehide", () => {
  for (const { conversation, message } of running.values()) {
    message.finishReason ??= "interrupted";
    save(conversation);
  }
});
isNarrow.onchange = () => toggleSidebar(!isNarrow.matches);

if (!storage.isKept) find("storage-note").textContent = "This browser keeps nothing: conversations end with the page.";
toggleSidebar(!isNarrow.matches);
showTheme();
changeSettings(settings);
followAddress();
