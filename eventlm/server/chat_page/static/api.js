// The server's API: models, and streams of replies.

/** To get the rest of a reply after the connection was lost. */
const RESUME_TRIES = 10;
const RESUME_PAUSE_MS = 1000;

/** An error reply; status 0: within a stream. `error` is the server's {message, code}, or whatever a proxy sends. */
export class ApiError extends Error {
  constructor(status, error, retryAfter = null) {
    super(error?.message || `The server answered with the status ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Nobody answers at the server's address. */
export class UnreachableError extends Error {}

/** The stream has ended before the reply. */
export class ConnectionLostError extends Error {}

/** [{id, max_model_len}] */
export async function listModels(apiKey) {
  const response = await request("v1/models", { headers: authorization(apiKey) });
  const { data } = await response.json();
  return data.map(({ id, max_model_len }) => ({ id, max_model_len }));
}

/**
 * The chunks of a streamed reply. Each is {data, isResumable}: the server keeps a resumable stream running when its
 * client leaves, and after a lost connection the rest is asked for. Throws ApiError, UnreachableError and
 * ConnectionLostError, the last two also when the signal aborts it; any other error is one of an unreadable reply.
 */
export async function* streamReply(path, body, { apiKey, signal }) {
  const headers = authorization(apiKey);
  const json = { ...headers, "Content-Type": "application/json" };
  let response = await request(path, { method: "POST", headers: json, body: JSON.stringify(body), signal });
  let last = null;
  let triesLeft = RESUME_TRIES;
  for (;;) {
    try {
      response ??= await request(last.path, { headers: { ...headers, "Last-Event-ID": last.id }, signal });
      for await (const { data, id } of serverSentEvents(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(0, chunk.error);
        if (id !== null) last = { path: streamPath(chunk.id), id };
        triesLeft = RESUME_TRIES;
        yield { data: chunk, isResumable: id !== null };
      }
      throw new ConnectionLostError();
    } catch (error) {
      const isLost = error instanceof ConnectionLostError || error instanceof UnreachableError;
      if (!isLost || !last || !triesLeft || signal.aborted) throw error;
    }
    triesLeft -= 1;
    response = null;
    await new Promise((resolve) => setTimeout(resolve, RESUME_PAUSE_MS));
  }
}

/** End a reply that would go on without its client, even while the page is being left. */
export async function cancelReply(replyId, apiKey) {
  await fetch(address(streamPath(replyId)), { method: "DELETE", keepalive: true, headers: authorization(apiKey) });
}

function streamPath(replyId) {
  return `v1/stream/${encodeURIComponent(replyId)}`;
}

/** Relative to the page, so that it works under any prefix of a reverse proxy. */
function address(path) {
  return new URL(path, document.baseURI);
}

/** Each character of a header stands for one byte; a key is sent as UTF-8. */
function authorization(apiKey) {
  const bytes = new TextEncoder().encode(apiKey);
  return apiKey ? { Authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

async function request(path, options) {
  const response = await fetch(address(path), { ...options, cache: "no-store" }).catch((error) => {
    throw new UnreachableError(error.message);
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const seconds = Number(response.headers.get("Retry-After"));
  throw new ApiError(response.status, body?.error, seconds || null);
}

/** The events of a body: {data, id}, where id is null if the event has none. */
async function* serverSentEvents(body) {
  let rest = "";
  let event = { data: [], id: null };
  for await (const text of decoded(body)) {
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) event.data.push(line.slice(5).replace(/^ /, ""));
      else if (line.startsWith("id:")) event.id = line.slice(3).trim();
      else if (line === "") {
        if (event.data.length) yield { data: event.data.join("\n"), id: event.id };
        event = { data: [], id: null };
      }
    }
  }
}

async function* decoded(body) {
  // A reply without content: there is nothing more to come.
  if (!body) return;
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => {
        throw new ConnectionLostError(error.message);
      });
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
