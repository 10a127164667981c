// A conversation and the settings as the body of a request.

import { parseMoreParameters } from "./settings.js";

export const CHAT = "v1/chat/completions";
/** For models without a chat template. */
export const COMPLETIONS = "v1/completions";

/** The body for either path. */
export function requestBody(path, conversation, settings) {
  const fields = {
    temperature: settings.temperature,
    top_p: settings.topP,
    max_tokens: settings.maxTokens,
    seed: settings.seed,
  };
  return {
    ...Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null)),
    ...parseMoreParameters(settings.moreParameters),
    model: settings.model,
    ...(path === CHAT ? { messages: chatMessages(conversation, settings) } : { prompt: prompt(conversation) }),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    eventlm: { timings: true },
  };
}

function chatMessages(conversation, { systemPrompt }) {
  const messages = systemPrompt.trim() ? [{ role: "system", content: systemPrompt }] : [];
  for (const message of conversation.messages) {
    const calls = message.toolCalls?.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
    if (message.role === "tool") {
      messages.push({ role: "tool", tool_call_id: message.toolCallId, content: message.content });
    } else if (message.content || calls?.length) {
      // A reply that failed before its first word says nothing.
      messages.push({ role: message.role, content: message.content, ...(calls?.length && { tool_calls: calls }) });
    }
  }
  return messages;
}

/** The conversation as one text, which the model continues. */
function prompt(conversation) {
  return conversation.messages
    .map((message) => message.content)
    .filter(Boolean)
    .join("\n");
}
