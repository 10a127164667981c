// Talks to the server of `eventlm view`. The token comes in the address behind #, which browsers send to nobody.

const KEY = "eventlm-view-token";

function findToken() {
  const found = /(?:^#|[?&])token=([\w-]+)/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(KEY, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(KEY) ?? "";
}

const token = findToken();

/** The answer of the server as an object. Raises Error with what the server says is wrong. */
export async function ask(path, body) {
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers: { Authorization: `Bearer ${token}` },
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(answer.error?.message ?? `the server answered ${response.status}`);
  return answer;
}

/** Run a command of the debugger. */
export function sendCommand(command) {
  return ask("/api/command", { command });
}

/** End the command that is under way. */
export function cancelCommand() {
  return ask("/api/cancel", {});
}
