// The browser's storage, or memory if the browser forbids it: then nothing outlives the page.

function browserStorage() {
  try {
    const probe = "eventlm.probe";
    localStorage.setItem(probe, "");
    localStorage.removeItem(probe);
    return localStorage;
  } catch (error) {
    // A full storage can still be read, and some of it deleted.
    return error.name === "QuotaExceededError" ? localStorage : null;
  }
}

const memory = new Map();
const storage = browserStorage();

export const isKept = storage !== null;

/** The value of a key as it was saved; null if there is none or it is not JSON. */
export function load(key) {
  try {
    return JSON.parse((storage ? storage.getItem(key) : memory.get(key)) ?? "null");
  } catch {
    return null;
  }
}

/** Throws QuotaExceededError when the storage is full. */
export function save(key, value) {
  const text = JSON.stringify(value);
  if (storage) storage.setItem(key, text);
  else memory.set(key, text);
}

/**
 * Run a task unless one for this key runs in another tab. Returns whether it has run. Browsers lock only over HTTPS and
 * on this machine; elsewhere the task always runs.
 */
export async function runAlone(key, task) {
  if (!navigator.locks) return task().then(() => true);
  return navigator.locks.request(key, { ifAvailable: true }, (lock) => lock !== null && task().then(() => true));
}

export function remove(key) {
  if (storage) storage.removeItem(key);
  else memory.delete(key);
}

export function keys(prefix) {
  const all = storage ? Object.keys(storage) : [...memory.keys()];
  return all.filter((key) => key.startsWith(prefix));
}
