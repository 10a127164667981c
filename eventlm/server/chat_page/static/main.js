// The page: which conversation is shown, what runs, and what the buttons do.

import { ApiError, listModels } from "./api.js";
import { Conversations, titleOf } from "./conversations.js";
import { element, growWithText, icon, onKey, sendOnEnter } from "./dom.js";
import { describeError } from "./errors.js";
import { Generation } from "./generation.js";
import { notify, toast } from "./notices.js";
import { INTERRUPTED, describeEnd, endReply } from "./reply.js";
import { loadSettings, saveSettings } from "./settings.js";
import { SettingsDialog } from "./settings_dialog.js";
import { exportConversation, showConversations } from "./sidebar.js";
import * as storage from "./storage.js";
import { Transcript } from "./transcript.js";

const SAVE_EVERY_MS = 2000;
const THEMES = ["system", "light", "dark"];

const find = (id) => document.getElementById(id);
const composerText = find("composer-text");
const fitComposer = growWithText(composerText);

let settings = loadSettings();
let models = [];
let current;
/** The replies under way by the ids of their conversations; null just before one begins and after its end. */
const running = new Map();

const conversations = new Conversations((id) => {
  const theirs = conversations.get(id);
  const generation = running.get(id);
  if (!generation && id === current.id) show(theirs ?? conversations.create());
  if (!theirs) {
    generation?.stop();
  } else if (generation) {
    // As long as a reply is under way here, no other tab changes anything but the title.
    generation.conversation.title = theirs.title;
    save(generation.conversation);
  }
  showState();
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
  const hadFocus = document.activeElement === find("stop");
  document.title = current.title ? `${current.title} · eventlm` : "eventlm";
  find("send").hidden = isRunning;
  find("stop").hidden = !isRunning;
  if (hadFocus && !isRunning) composerText.focus();
  showConversations(find("conversations"), conversations.list(), current.id, {
    address: ({ id }) => `#${id}`,
    rename({ id }, title) {
      // It may have gone on in another tab meanwhile.
      const conversation = conversations.get(id);
      if (title && conversation) {
        conversation.title = title;
        keep(() => conversations.restore(conversation));
      }
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
  if (location.hash) history.pushState(null, "", location.pathname + location.search);
  followAddress();
}

function save(conversation) {
  keep(() => conversations.save(conversation));
}

function keep(write) {
  try {
    write();
  } catch {
    notify("The browser's storage is full. Export or delete conversations, or new messages are lost with the page.");
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

/** Send what is in the composer; it comes back there if it cannot be sent. */
async function send() {
  const text = composerText.value;
  if (!text.trim() || running.has(current.id)) return;
  fillComposer("");
  const isSent = await reply(current, (conversation) => {
    if (!conversation.messages.length) conversation.title = titleOf(text);
    conversation.messages.push({ role: "user", content: text });
  });
  if (!isSent) fillComposer([text, composerText.value].filter(Boolean).join("\n"));
}

function fillComposer(text) {
  composerText.value = text;
  fitComposer();
}

/** Generate the last reply again. */
function again() {
  reply(current, ({ messages }) => {
    if (messages.at(-1).role === "assistant") messages.pop();
  });
  focusComposer();
}

function edit(index, text) {
  reply(current, (conversation) => {
    const { messages } = conversation;
    messages.splice(index, Infinity, { ...messages[index], content: text });
    if (index === 0) conversation.title = titleOf(text);
  });
  focusComposer();
}

function answerCalls(results) {
  reply(current, ({ messages }) => {
    for (const [toolCallId, content] of results) messages.push({ role: "tool", toolCallId, content });
  });
  focusComposer();
}

/**
 * Change a conversation by `change(conversation)` and let the model reply to it. Returns whether that was possible,
 * when it is over: not without a model, nor while another reply to it is under way.
 */
async function reply(conversation, change) {
  const { id } = conversation;
  if (running.has(id)) return false;
  running.set(id, null);
  showState();
  try {
    if (!models.length) await findModels();
    if (!models.length) return false;
    const isAlone = await storage.runAlone(`eventlm.reply.${id}`, () =>
      generate(conversations.get(id) ?? conversation, change),
    );
    if (!isAlone) notify("Another tab is writing a reply in this conversation. Stop it there, or wait until it ends.");
    return isAlone;
  } finally {
    running.delete(id);
    showState();
  }
}

async function generate(conversation, change) {
  const { id } = conversation;
  let frame = 0;
  let savedAt = Date.now();
  const generation = new Generation(conversation, settings, {
    change,
    onChange() {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        transcript.refresh(generation.message);
      });
      if (Date.now() - savedAt < SAVE_EVERY_MS || generation.isUndoable || !conversations.get(id)) return;
      savedAt = Date.now();
      save(conversation);
    },
  });
  running.set(id, generation);
  if (!generation.isUndoable) save(conversation);
  if (current.id === id) {
    // So that a reload shows it again, without an entry in the history.
    history.replaceState(null, "", `#${id}`);
    show(conversation);
    transcript.scrollToEnd();
  }
  await generation.run();
  cancelAnimationFrame(frame);
  running.set(id, null);
  await finish(generation, change);
}

/** A reply is over. If it has replaced nothing, what `change` removed is there again. */
async function finish(generation, change) {
  const { conversation, message, failure, isUndoable } = generation;
  const retry = async () => {
    if (!(await reply(conversation, change))) notifyError(message.error, retry);
  };
  if (isUndoable) generation.undo();
  if (conversations.get(conversation.id)) save(conversation);
  if (current.id === conversation.id && isUndoable) show(conversation);
  else if (current.id === conversation.id) transcript.settle(message);
  // An error is read out by itself.
  find("announcement").textContent = message.error ? "" : describeEnd(message.finishReason) || "The reply is complete.";
  // The server may have been started again with another model.
  if (failure?.code === "model_not_found") await findModels();
  else if (failure && !(failure instanceof ApiError)) models = [];
  if (isUndoable && failure) notifyError(message.error, retry);
}

/** On a touch screen that would open the keyboard over the page. */
function focusComposer() {
  if (!matchMedia("(pointer: coarse)").matches) composerText.focus();
}

// Models and settings

/** The request for the models that is under way, {apiKey, end}, if any. */
let search = null;

function findModels() {
  if (search?.apiKey !== settings.apiKey) {
    search = { apiKey: settings.apiKey };
    search.end = receiveModels(search);
  }
  return search.end;
}

async function receiveModels(own) {
  const [found, error] = await listModels(own.apiKey).then(
    (each) => [each, null],
    (each) => [[], describeError(each, own.apiKey)],
  );
  // The key has changed meanwhile.
  if (search !== own) return search?.end;
  search = null;
  models = found;
  if (error) notifyError(error, findModels);
  else notify("");
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

/** What went wrong, and what to do: enter a key, or what `retry` does. */
function notifyError({ title, detail, needsKey }, retry) {
  const act = () => {
    notify("");
    retry();
  };
  if (needsKey) notify(`${title} ${detail}`, "Enter API key", () => dialog.open(settings, "apiKey"));
  else notify(`${title} ${detail}`, "Try again", act);
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
  document.querySelector("main").inert = isShown && isNarrow.matches;
  find("toggle-sidebar").setAttribute("aria-expanded", isShown);
}

function closeOverlay() {
  if (!isNarrow.matches || !document.body.classList.contains("shows-sidebar")) return;
  toggleSidebar(false);
  find("toggle-sidebar").focus();
}

// Events

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
sendOnEnter(composerText, send);
find("skip").onclick = (event) => {
  // Its address is no conversation's.
  event.preventDefault();
  closeOverlay();
  composerText.focus();
};
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
onKey(document, "Escape", (event) => {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (isNarrow.matches && document.body.classList.contains("shows-sidebar")) closeOverlay();
  else running.get(current.id)?.stop();
});
addEventListener("hashchange", followAddress);
addEventListener("pagehide", () => {
  for (const generation of [...running.values()].filter(Boolean)) {
    generation.cancel();
    if (generation.isUndoable) generation.undo();
    else endReply(generation.message, INTERRUPTED);
    save(generation.conversation);
  }
});
isNarrow.onchange = () => toggleSidebar(!isNarrow.matches);

if (!storage.isKept) find("storage-note").textContent = "Lost when the page closes.";
toggleSidebar(!isNarrow.matches);
showTheme();
changeSettings(settings);
followAddress();
