// One reply under way, from the request to its end.

import { cancelReply, streamReply } from "./api.js";
import { describeError, isWithoutChatTemplate } from "./errors.js";
import { STOPPED, Stopwatch, addChunk, emptyReply, endReply, isEmpty } from "./reply.js";
import { CHAT, COMPLETIONS, requestBody } from "./request.js";

/** Models that were found to have no chat template, so that their next reply asks for a completion at once. */
const withoutTemplate = new Set();

export class Generation {
  /** What made the reply fail, if anything; `message.error` is its description. */
  failure = null;
  #aborter = new AbortController();
  #stopwatch = new Stopwatch();
  #settings;
  #before;
  #isReplacing;
  #resumableId = null;

  /**
   * Changes the conversation by `change(conversation)` and appends the reply, `message`. onChange is called whenever
   * the message has grown.
   */
  constructor(conversation, settings, { change, onChange }) {
    const { title, messages } = conversation;
    this.conversation = conversation;
    this.message = emptyReply(settings.model);
    this.onChange = onChange;
    this.#settings = settings;
    this.#before = { title, messages };
    conversation.messages = [...messages];
    change(conversation);
    this.#isReplacing = messages.some((each) => !isEmpty(each) && !conversation.messages.includes(each));
    conversation.messages.push(this.message);
  }

  /** Whether it replaces messages and nothing has come yet in their place. */
  get isUndoable() {
    return this.#isReplacing && isEmpty(this.message);
  }

  /** Put the replaced messages back. */
  undo() {
    Object.assign(this.conversation, this.#before);
  }

  /** Run until the reply is complete, is stopped or fails; the message then says which. */
  async run() {
    try {
      await this.#receive(withoutTemplate.has(this.#settings.model) ? COMPLETIONS : CHAT);
    } catch (error) {
      if (!this.#aborter.signal.aborted) {
        this.failure = error;
        this.message.error = describeError(error, this.#settings.apiKey);
      }
    }
    endReply(this.message, this.#aborter.signal.aborted ? STOPPED : null);
  }

  stop() {
    this.#aborter.abort();
    this.cancel();
  }

  /** End the reply on the server if it would go on without its client. */
  cancel() {
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
