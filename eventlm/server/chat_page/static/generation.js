// One reply under way, from the request to its end.

import { cancelReply, streamReply } from "./api.js";
import { describeError, isWithoutChatTemplate } from "./errors.js";
import { Stopwatch, addChunk, emptyReply } from "./reply.js";
import { CHAT, COMPLETIONS, requestBody } from "./request.js";

/** Models that were found to have no chat template, so that their next reply asks for a completion at once. */
const withoutTemplate = new Set();

export class Generation {
  #aborter = new AbortController();
  #stopwatch = new Stopwatch();
  #settings;
  #resumableId = null;

  /** Appends the reply, `message`, to the conversation. onChange is called whenever the message has grown. */
  constructor(conversation, settings, onChange) {
    this.conversation = conversation;
    this.message = emptyReply(settings.model);
    this.onChange = onChange;
    this.#settings = settings;
    conversation.messages.push(this.message);
  }

  /** Until the reply is complete, stopped or has failed, which the message says then. */
  async run() {
    try {
      await this.#receive(withoutTemplate.has(this.#settings.model) ? COMPLETIONS : CHAT);
    } catch (error) {
      if (this.#aborter.signal.aborted) this.message.finishReason ??= "stopped";
      else this.message.error = describeError(error, this.#settings.apiKey);
    }
  }

  stop() {
    this.#aborter.abort();
    if (this.#resumableId) cancelReply(this.#resumableId, this.#settings.apiKey).catch(() => {});
  }

  async #receive(path) {
    try {
      await this.#readStream(path);
    } catch (error) {
      if (path !== CHAT || !isWithoutChatTemplate(error)) throw error;
      withoutTemplate.add(this.#settings.model);
      await this.#readStream(COMPLETIONS);
    }
  }

  async #readStream(path) {
    this.message.isContinuation = path === COMPLETIONS;
    const body = requestBody(path, this.conversation, this.#settings);
    const options = { apiKey: this.#settings.apiKey, signal: this.#aborter.signal };
    for await (const { data, isResumable } of streamReply(path, body, options)) {
      this.#resumableId = isResumable ? data.id : this.#resumableId;
      addChunk(this.message, data, this.#stopwatch);
      this.onChange();
    }
  }
}
