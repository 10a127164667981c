// The server's API: models, and streams of replies.

/** An error that the server has answered with; status 0: within a stream. */
export class ApiError extends Error {
  constructor(status, { message, code, param } = {}, retryAfter = null) {
    super(message || `The server answered with the status ${status}.`);
    this.status = status;
    this.code = code ?? null;
    this.param = param ?? null;
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
  return (await response.json()).data;
}

/**
 * The chunks of a streamed reply. Each is {data, isResumable}: the server keeps a resumable stream running when its
 * client leaves. Throws ApiError, UnreachableError and ConnectionLostError, the last two also when the
 * signal aborts it.
 */
export async function* streamReply(path, body, { apiKey, signal }) {
  const response = await request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization(apiKey) },
    body: JSON.stringify(body),
    signal,
  });
  for await (const { data, id } of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(0, chunk.error);
    yield { data: chunk, isResumable: id !== null };
  }
  throw new ConnectionLostError();
}

/** End a reply that would go on without its client. */
export async function cancelReply(replyId, apiKey) {
  await fetch(address(`v1/stream/${encodeURIComponent(replyId)}`), {
    method: "DELETE",
    headers: authorization(apiKey),
  });
}

/** Relative to the page, so that it works under any prefix of a reverse proxy. */
function address(path) {
  return new URL(path, document.baseURI);
}

/** A header takes bytes, so that a key of other letters goes as UTF-8. */
function authorization(apiKey) {
  const bytes = new TextEncoder().encode(apiKey);
  return apiKey ? { Authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

async function request(path, options) {
  const response = await fetch(address(path), { ...options, cache: "no-store" }).catch((error) => {
    throw new UnreachableError(error.message);
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const seconds = Number(response.headers.get("Retry-After"));
  throw new ApiError(response.status, body.error, seconds || null);
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
