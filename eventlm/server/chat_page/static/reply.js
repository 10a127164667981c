// A reply as it grows: chunks of a stream become an assistant's message.

/** Finish reasons of this page's own, besides the API's. */
export const STOPPED = "stopped";
export const INTERRUPTED = "interrupted";

/** An empty message of an assistant. `finishReason` is null until it is over. */
export function emptyReply(model) {
  return { role: "assistant", content: "", reasoning: "", toolCalls: [], finishReason: null, model };
}

/** Whether a message has no content yet. */
export function isEmpty({ content, reasoning, toolCalls, finishReason }) {
  const isOver = finishReason && finishReason !== STOPPED && finishReason !== INTERRUPTED;
  return !content && !reasoning && !toolCalls?.length && !isOver;
}

/** Close a message, with this reason unless the server gave one. Tool calls that were cut off are dropped. */
export function endReply(message, reason) {
  message.finishReason ??= reason;
  if (message.finishReason !== "tool_calls") message.toolCalls = message.toolCalls.filter((call) => isComplete(call));
}

function isComplete(call) {
  try {
    return Boolean(JSON.parse(call.arguments));
  } catch {
    return false;
  }
}

/** How long a reply takes by this browser's clock, for when the server does not say. */
export class Stopwatch {
  #started = performance.now();
  #first = null;

  firstToken() {
    this.#first ??= performance.now();
  }

  /** {ttftMs, decodeMs}; null if nothing has come. */
  read() {
    if (this.#first === null) return { ttftMs: null, decodeMs: null };
    return { ttftMs: this.#first - this.#started, decodeMs: performance.now() - this.#first };
  }
}

/** Add a chunk of a chat or of a completion to the message. */
export function addChunk(message, chunk, stopwatch) {
  const choice = chunk.choices?.find(({ index }) => index === 0);
  if (choice) {
    const delta = choice.delta ?? { content: choice.text };
    const said = delta.content || delta.reasoning_content || delta.tool_calls?.length;
    if (said) stopwatch.firstToken();
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) addCall(message.toolCalls, call);
    message.finishReason = choice.finish_reason ?? message.finishReason;
  }
  if (chunk.usage) {
    const [timings] = chunk.eventlm?.timings ?? [];
    message.stats = stats(chunk.usage, timings, stopwatch.read());
  }
}

function addCall(calls, { index, id, function: { name, arguments: text } }) {
  calls[index] ??= { id, name, arguments: "" };
  calls[index].arguments += text ?? "";
}

function stats(usage, timings, measured) {
  const ttftMs = timings?.ttft_ms ?? measured.ttftMs;
  const decodeMs = timings?.decode_ms ?? measured.decodeMs;
  const following = usage.completion_tokens - 1;
  return {
    promptTokens: usage.prompt_tokens,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    outputTokens: usage.completion_tokens,
    ttftMs,
    tokensPerSecond: following > 0 && decodeMs > 0 ? (following / decodeMs) * 1000 : null,
  };
}

/** `42 tokens · 23.1 tokens/s · first token after 0.18 s` */
export function describeStats({ outputTokens, tokensPerSecond, ttftMs }) {
  return [
    counted(outputTokens, "token"),
    tokensPerSecond && `${rounded(tokensPerSecond)} tokens/s`,
    ttftMs !== null && `first token after ${seconds(ttftMs)}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

export function describePrompt({ promptTokens, cachedTokens }) {
  const cached = cachedTokens ? `, ${cachedTokens.toLocaleString("en")} of them from the prefix cache` : "";
  return `Prompt: ${counted(promptTokens, "token")}${cached}`;
}

/** How a reply ended, in words; empty if it is simply complete. */
export function describeEnd(finishReason) {
  return (
    {
      length: "The reply has reached its limit of tokens.",
      content_filter: "The reply was filtered.",
      [STOPPED]: "Stopped.",
      [INTERRUPTED]: "The page was left before the reply was complete.",
    }[finishReason] ?? ""
  );
}

function counted(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

function rounded(number) {
  return number < 100 ? number.toFixed(1) : Math.round(number).toLocaleString("en");
}

function seconds(ms) {
  return ms < 1000 ? `${Math.max(1, Math.round(ms))} ms` : `${(ms / 1000).toFixed(1)} s`;
}
