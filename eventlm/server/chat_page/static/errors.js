// Errors in plain words.

import { ApiError, ConnectionLostError, UnreachableError } from "./api.js";

const BY_CODE = {
  context_length_exceeded: "The conversation is too long for this model. Start a new one, or lower the max tokens.",
  model_not_found: "The server does not have this model. Choose another one at the top.",
  rate_limit_exceeded: "The server is too busy.",
  deadline_exceeded: "The reply was not complete by its deadline.",
  aborted: "An operator stopped this reply.",
};
const BY_STATUS = {
  400: "The server cannot use this request.",
  403: "This API key does not allow that.",
  413: "The conversation is larger than the server accepts.",
  429: "The server is too busy.",
  503: "The server is not taking requests at the moment.",
};

/** {title, detail, needsKey}: what happened, the server's own words, and whether an API key would help. */
export function describeError(error, apiKey) {
  if (error instanceof ConnectionLostError || error instanceof UnreachableError) {
    const isLost = error instanceof ConnectionLostError;
    const title = isLost ? "The connection was lost before the reply was complete." : "The server cannot be reached.";
    return { title, detail: "Check that the server is running, then try again.", needsKey: false };
  }
  if (!(error instanceof ApiError)) {
    const detail = "A proxy may have answered in its place.";
    return { title: "The server sent an unreadable reply.", detail, needsKey: false };
  }
  if (error.status === 401) {
    const title = apiKey ? "The server does not accept this API key." : "This server needs an API key.";
    return { title, detail: error.message, needsKey: true };
  }
  const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  const title = BY_CODE[error.code] ?? BY_STATUS[error.status] ?? "The server could not complete the reply.";
  return { title: title + wait, detail: error.message, needsKey: false };
}

/** Whether the model cannot chat but can continue a text. */
export function isWithoutChatTemplate(error) {
  return error instanceof ApiError && error.code === "no_chat_template";
}
