"""From request bodies in OpenAI's shapes to the engine's requests: checks, the chat template, tokens and grammars."""

from __future__ import annotations

from typing import Any

from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.sampling_params import SamplingParams
from eventlm.text.chat_messages import chat_messages
from eventlm.text.chat_template import RESERVED_NAMES, ChatTemplate, ChatTemplateError
from eventlm.text.echo import Echo
from eventlm.text.engine import TextEngine
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.prompt_encoder import CHARACTERS_OF_A_MESSAGE, PromptEncoder
from eventlm.text.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from eventlm.text.requests.validation import (
    Limits,
    check_request,
    completion_prompts,
    engine_request,
    sampling_params,
    truncate_prompt,
)
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.definitions import ToolUse
from eventlm.text.tools.formats import Formats
from eventlm.text.tools.request import requested_format, requested_grammar, requested_tools, with_format
from eventlm.text.tools.teaching import teach


class RequestMaker:
    """Makes the engine's requests for one model.

    `vocab_size` is the model's: prompts of token ids lie below it. `formats` are those of tool calls and reasoning.
    """

    def __init__(
        self,
        engine: TextEngine,
        tokenizer: Tokenizer,
        *,
        defaults: SamplingParams,
        vocab_size: int,
        formats: Formats,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._formats = formats
        self.encoder = PromptEncoder(tokenizer)
        self._grammars = GrammarChecker(list(tokenizer.special_bytes.values()))

    def close(self) -> None:
        """Release the threads; prompts and grammars that wait are dropped."""
        self.encoder.close()
        self._grammars.close()

    def check(self, body: GenerationRequest) -> SamplingParams:
        """The body's sampling parameters. Raises InputError for what is wrong with fields of chats and completions."""
        check_request(body, self._limits)
        return sampling_params(body, self._defaults, self._vocab_size)

    async def chat(self, body: ChatCompletionRequest, received_ns: int) -> Request:
        """The request for a conversation that came in at `received_ns` of the engine's clock. Raises InputError."""
        params = self.check(body)
        formats, tokenizer = self._formats, self._tokenizer
        tools = requested_tools(body, formats)
        content_grammar = await self._grammars.requested(body)
        prompt_token_ids = await self._encode_messages(body, tools)
        format = requested_format(body, tools, formats, tokenizer, prompt_token_ids)
        grammar = await requested_grammar(tools, format, formats, tokenizer, content_grammar, self._grammars)
        request = engine_request(
            body,
            params,
            prompt_token_ids,
            limits=self._limits,
            bad_words=await self.encoder.encode_bad_words(body.bad_words or []),
            grammar=grammar,
            prompt_param="messages",
            received_ns=received_ns,
            ready_ns=self._engine.now_ns(),
        )
        return with_format(request, format, formats, tokenizer)

    async def completions(self, body: CompletionRequest, received_ns: int) -> tuple[list[Request], list[Echo]]:
        """A request for each prompt, and what to echo of each if an echo is asked for. Raises InputError."""
        params = self.check(body)
        bad_words = await self.encoder.encode_bad_words(body.bad_words or [])
        grammar = await self._grammars.requested(body)
        group, echoes = [], []
        for prompt in completion_prompts(body, self._vocab_size):
            token_ids = await self._encoded(body, prompt)
            kept = truncate_prompt(body, token_ids, self._limits)
            group.append(
                engine_request(
                    body,
                    params,
                    kept,
                    limits=self._limits,
                    bad_words=bad_words,
                    grammar=grammar,
                    prompt_param="prompt",
                    received_ns=received_ns,
                    ready_ns=self._engine.now_ns(),
                )
            )
            if body.echo:
                whole_text = prompt if isinstance(prompt, str) and len(kept) == len(token_ids) else None
                echoes.append(await self.encoder.echo(whole_text, kept))
        return group, echoes

    async def encode_messages(self, body: ChatCompletionRequest) -> list[int]:
        """The token ids of a conversation, as `chat` has them. Raises InputError."""
        return await self._encode_messages(body, requested_tools(body, self._formats))

    @property
    def _limits(self) -> Limits:
        return Limits(self._engine.model_names, self._engine.max_model_len, self._vocab_size)

    async def _encoded(self, body: CompletionRequest, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self.encoder.encode(prompt, add_special_tokens=body.add_special_tokens is not False)

    async def _encode_messages(self, body: ChatCompletionRequest, tools: ToolUse | None) -> list[int]:
        template = self._tokenizer.chat_template
        if template is None:
            raise InputError(
                "messages", "This model has no chat template; use /v1/completions, or a model that was made for chat."
            )
        definitions = tools.definitions if tools is not None else None
        num_parts = sum(len(each.content) if isinstance(each.content, list) else 1 for each in body.messages)
        messages = await self.encoder.run(
            CHARACTERS_OF_A_MESSAGE * num_parts, lambda: _template_messages(self._formats, body, template, definitions)
        )
        if body.documents and "documents" not in template.source:
            raise InputError(
                "documents",
                "'documents' are not supported by this model: its chat template does not read them; write them into a "
                "message.",
            )
        continues = bool(body.continue_final_message)
        if continues and body.add_generation_prompt:
            raise InputError(
                "continue_final_message",
                "'continue_final_message' and 'add_generation_prompt' exclude each other: the one goes on with the "
                "last message, the other begins a new one.",
            )
        try:
            token_ids = await self.encoder.encode_chat(
                template,
                messages,
                tools=definitions,
                documents=body.documents,
                add_generation_prompt=body.add_generation_prompt is not False and not continues,
                continue_final_message=continues,
                variables=_variables(template, body),
                add_special_tokens=bool(body.add_special_tokens),
            )
        except ChatTemplateError as error:
            raise InputError("messages", f"Invalid value for 'messages': {error}.") from error
        return truncate_prompt(body, token_ids, self._limits)


def _template_messages(
    formats: Formats, body: ChatCompletionRequest, template: ChatTemplate, definitions: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The messages for the template, with the tools in them if it does not know of any. Raises InputError."""
    messages = chat_messages(body, knows_developer=template.knows_developer)
    if template.knows_tools or formats.tools is None:
        return messages
    try:
        return teach(messages, definitions or [], formats.tools.syntax)
    except RecursionError as error:
        raise InputError("messages", "Tools or their calls are nested too deeply.") from error


def _variables(template: ChatTemplate, body: ChatCompletionRequest) -> dict[str, Any]:
    """What the body sets of the template's own variables. Raises InputError."""
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in RESERVED_NAMES:
            param = f"chat_template_kwargs.{name}"
            raise InputError(param, f"Invalid value for '{param}': the server sets this variable itself.")
    effort = body.reasoning_effort
    if effort is not None and "reasoning_effort" in template.source:
        variables["reasoning_effort"] = effort
    elif effort not in (None, "none"):
        raise InputError(
            "reasoning_effort",
            "'reasoning_effort' is not supported by this model: its chat template does not read it; leave it out.",
        )
    return variables
