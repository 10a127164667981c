"""Builds the engine's requests, for the HTTP API, `LLM` and the command line: checks, defaults, tokens and grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec import structs

from eventlm.engine.backend import ForwardedRequest
from eventlm.engine.request import BeamSettings, Request
from eventlm.errors import InputError, InvalidTypeError, NoChatTemplateError, PromptTooLongError, UnknownModelError
from eventlm.field_errors import out_of_bounds
from eventlm.sampling_params import SMALLEST_TEMPERATURE, SamplingParams
from eventlm.scheduling_params import SchedulingParams
from eventlm.text.beam_search.fields import requested_beams
from eventlm.text.chat.messages import render_chat
from eventlm.text.chat.request_template import UNTRUSTED_TEMPLATES, RequestTemplates
from eventlm.text.echo import Echo
from eventlm.text.engine import Engine
from eventlm.text.grammar_checker import GrammarChecker
from eventlm.text.prompt_encoder import CHARACTERS_OF_A_MESSAGE, INLINE_CHARACTERS, PromptEncoder
from eventlm.text.protocol import (
    LARGEST_SEED,
    MAX_GROUP_SEQUENCES,
    SAMPLING_FIELDS,
    SMALLEST_SEED,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)
from eventlm.text.tokenizer import Tokenizer
from eventlm.text.tools.call_grammar import reply_grammar
from eventlm.text.tools.definitions import ToolUse, requested_tools
from eventlm.text.tools.formats import NO_FORMATS, Formats
from eventlm.text.tools.message import requested_format
from eventlm.text.tools.reasoning_budget import ReasoningBudget, reasoning_budget
from eventlm.types import RequestKind

#: Of a number in a message.
_MAX_DIGITS = 40
Used = TypeVar("Used")


class RequestBuilder:
    """Builds requests for one model.

    vocab_size: the model's; token ids are below it. formats: of tool calls and reasoning. templates:
    renders those that requests bring. scheduling (of methods): the
    fields of `SchedulingParams` that the caller decides.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        defaults: SamplingParams,
        vocab_size: int,
        formats: Formats = NO_FORMATS,
        templates: RequestTemplates = UNTRUSTED_TEMPLATES,
    ) -> None:
        self._engine = engine
        self._templates = templates
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._vocab_size = vocab_size
        self._formats = formats
        self._special_marks = formats.special_marks(tokenizer)
        self.encoder = PromptEncoder(tokenizer)
        self.grammars = GrammarChecker(list(tokenizer.special_bytes.values()))

    def close(self) -> None:
        """Release the threads; prompts and grammars that wait are dropped."""
        self.encoder.close()
        self.grammars.close()

    async def chat(
        self, body: ChatCompletionRequest, received_ns: int, *, param: str = "messages", **scheduling: Any
    ) -> Request:
        """The request for a conversation received at `received_ns` of the engine's clock. Errors call it `param`.

        Raises InputError.
        """
        params = self.params(body)
        formats, tokenizer = self._formats, self._tokenizer
        tools = requested_tools(body, formats)
        content_grammar = await self.grammars.requested(body)
        prompt_token_ids = await self._encode_messages(body, tools, param)
        format = requested_format(body, tools, formats, tokenizer, prompt_token_ids)
        params = structs.replace(
            params,
            bad_words_token_ids=await self.encoder.encode_bad_words(body.bad_words or []),
            grammar=await reply_grammar(
                tools,
                formats,
                format.reasoning,
                frozenset(self._special_marks.values()),
                content_grammar,
                self.grammars,
                self._reasoning_budget(body),
            ),
        )
        return self.request(
            params,
            prompt_token_ids,
            param=param,
            cache_salt=body.cache_salt,
            beams=requested_beams(body, params, self._vocab_size),
            visible_token_ids=() if format.is_plain else tuple(self._special_marks),
            message_format=b"" if format.is_plain else msgspec.msgpack.encode(format),
            model=body.model,
            has_text_ends=bool(params.stop) or format.ends_after_call,
            received_ns=received_ns,
            **scheduling,
        )

    def _reasoning_budget(self, body: ChatCompletionRequest) -> ReasoningBudget | None:
        """What the body allows for reasoning; None: any number of tokens. Raises InputError."""
        num_tokens = body.reasoning_budget
        if num_tokens is None:
            return None
        if body.separate_reasoning is False:
            raise InputError(
                "thinking_token_budget", "'thinking_token_budget' is not allowed when 'separate_reasoning' is false."
            )
        most = min(num_tokens, self._engine.max_model_len)
        return reasoning_budget(most, self._formats, self._tokenizer, self._vocab_size)

    async def completions(
        self, body: CompletionRequest, received_ns: int, **scheduling: Any
    ) -> tuple[list[Request], list[Echo]]:
        """A request for each prompt, and what to echo of each if an echo is asked for. Raises InputError."""
        params = self.params(body)
        bad_words = await self.encoder.encode_bad_words(body.bad_words or [])
        grammar = await self.grammars.requested(body)
        params = structs.replace(params, bad_words_token_ids=bad_words, grammar=grammar if body.generates else "")
        prompts = read_prompts(body.prompt, self._vocab_size, "prompt")
        beams = requested_beams(body, params, self._vocab_size)
        if len(prompts) * (beams.width if beams else params.n) > MAX_GROUP_SEQUENCES:
            each = "beam_width" if beams else "n"
            raise InputError(
                "prompt", f"Invalid value for 'prompt': prompts times {each} is at most {MAX_GROUP_SEQUENCES}."
            )
        special = body.add_special_tokens is not False
        group, echoes = [], []
        for prompt in prompts:
            token_ids = (
                prompt if isinstance(prompt, list) else await self.encoder.encode(prompt, add_special_tokens=special)
            )
            kept = self._truncate(body, token_ids)
            group.append(
                self.request(
                    params,
                    kept,
                    param="prompt",
                    kind="generate" if body.generates else "score",
                    cache_salt=body.cache_salt,
                    beams=beams,
                    model=body.model,
                    received_ns=received_ns,
                    **scheduling,
                )
            )
            if body.echo:
                whole_text = prompt if isinstance(prompt, str) and len(kept) == len(token_ids) else None
                echoes.append(await self.encoder.echo(whole_text, kept))
        return group, echoes

    def params(self, body: GenerationRequest) -> SamplingParams:
        """The body's sampling parameters over the model's defaults, resolved. Raises InputError."""
        _check_body(body, self._engine.model_names)
        given = {field.name: value for field in SAMPLING_FIELDS if (value := getattr(body, field.name)) is not None}
        given |= {
            # None: as many as the context holds, or none for a prompt that is only scored. See `request`.
            "max_tokens": body.most_tokens or None,
            "logprobs": body.num_logprobs,
            "prompt_logprobs": body.num_prompt_logprobs,
            "logit_bias": {int(key): bias for key, bias in body.logit_bias.items()} if body.logit_bias else None,
            "stop": body.stop if body.generates else [],
            # The grammar is built from all fields that ask for a structure.
            "structured_outputs": None,
        }
        return self.resolve(structs.replace(self._defaults, **given))

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """The parameters in the standard form that workers take. Raises InputError.

        A `top_k` that covers the vocabulary becomes 0, a number of log-probabilities at most its size, and a
        temperature that means greedy 0. The end tokens are those of the defaults.
        """
        params.check()
        vocab_size = self._vocab_size
        check_token_ids(params.stop_token_ids or (), vocab_size, "stop_token_ids")
        check_token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        check_token_ids(params.logprob_token_ids or (), vocab_size, "logprob_token_ids")
        for token_id in params.logit_bias or ():
            if token_id >= vocab_size:
                raise _unknown_token(f"logit_bias.{token_id}", token_id, vocab_size)
        return structs.replace(
            params,
            temperature=params.temperature if params.temperature >= SMALLEST_TEMPERATURE else 0.0,
            top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
            logprobs=_num_logprobs(params.logprobs, vocab_size),
            prompt_logprobs=_num_logprobs(params.prompt_logprobs, vocab_size),
            eos_token_ids=self._defaults.eos_token_ids,
        )

    def request(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        *,
        param: str,
        cache_salt: str | None = None,
        beams: BeamSettings | None = None,
        visible_token_ids: tuple[int, ...] = (),
        message_format: bytes = b"",
        kind: RequestKind = "generate",
        model: str = "",
        forwarded: ForwardedRequest | None = None,
        **scheduling: Any,
    ) -> Request:
        """The request for one prompt with resolved parameters. Errors call the prompt `param`.

        Raises InputError for an empty prompt and for one that does not fit the context with its output.
        """
        num_tokens, context = len(prompt_token_ids), self._engine.max_model_len
        if not num_tokens:
            raise InputError(param, f"Invalid value for '{param}': it is empty.")
        prompt = f"the {param}" if param.isidentifier() else param
        max_tokens = None
        if kind == "generate":
            num_new = params.max_tokens or 1
            if num_tokens + num_new > context:
                raise PromptTooLongError(
                    param,
                    f"This model's maximum context length is {context} tokens. However, you requested "
                    f"{num_tokens + num_new} tokens ({num_tokens} in {prompt}, {num_new} in the completion). Please "
                    f"reduce the length of {prompt} or the completion.",
                    num_tokens,
                    context - num_new,
                )
            max_tokens = params.max_tokens or context - num_tokens
        elif num_tokens > context:
            raise PromptTooLongError(
                param,
                f"This model's maximum context length is {context} tokens. However, {prompt} has {num_tokens} tokens. "
                "Please reduce its length.",
                num_tokens,
                context,
            )
        if params.min_tokens > (max_tokens or 0):
            raise InputError(
                "min_tokens",
                f"Invalid value for 'min_tokens': {params.min_tokens} is more than max_tokens, which is "
                f"{max_tokens or 0}.",
            )
        return Request(
            prompt_token_ids=prompt_token_ids,
            sampling=params if params.max_tokens == max_tokens else structs.replace(params, max_tokens=max_tokens),
            cache_salt=cache_salt or "",
            beams=beams,
            visible_token_ids=visible_token_ids,
            message_format=message_format,
            forwarded=forwarded,
            scheduling=SchedulingParams(
                **{
                    "model": model or self._engine.model_names[0],
                    "kind": kind,
                    # Only what is computed has log-probabilities.
                    "skip_cache_read": params.prompt_logprobs is not None or kind == "score",
                    "has_text_ends": bool(params.stop),
                    "waits_for_grammar": bool(params.grammar),
                    "ready_ns": self._engine.now_ns(),
                    **scheduling,
                }
            ),
        )

    async def encode_messages(self, body: ChatCompletionRequest) -> list[int]:
        """The token ids of a conversation. Raises InputError."""
        return await self._encode_messages(body, requested_tools(body, self._formats), "messages")

    async def _encode_messages(self, body: ChatCompletionRequest, tools: ToolUse | None, param: str) -> list[int]:
        # The template writes the special tokens itself.
        special = bool(body.add_special_tokens)
        token_ids = await self._with_prompt(
            body, tools, param, lambda text: self._tokenizer.encode(text, add_special_tokens=special)
        )
        return self._truncate(body, token_ids)

    async def render_messages(self, body: ChatCompletionRequest) -> str:
        """The prompt of a conversation. Raises InputError."""
        return await self._with_prompt(body, requested_tools(body, self._formats), "messages", lambda text: text)

    async def _with_prompt(
        self, body: ChatCompletionRequest, tools: ToolUse | None, param: str, use: Callable[[str], Used]
    ) -> Used:
        """What `use` makes of the prompt of a conversation. Raises InputError."""
        options: dict[str, Any] = {
            "tools": tools.definitions if tools is not None else None,
            "tool_format": self._formats.tools,
            "param": param,
        }
        if body.chat_template is not None:
            text = await self._templates.render(body, self._tokenizer.special_tokens, **options)
            return await self.encoder.run(len(text), lambda: use(text))
        template = self._tokenizer.chat_template
        if template is None:
            raise NoChatTemplateError(
                param, "This model has no chat template; use /v1/completions, or a model that was made for chat."
            )
        # These may be of any size, and a template may write them at any length.
        is_unbounded = tools or body.chat_template_kwargs or body.documents or any(m.tool_calls for m in body.messages)
        size = sum(_size(message) for message in body.messages)
        return await self.encoder.run(
            INLINE_CHARACTERS + 1 if is_unbounded else size, lambda: use(render_chat(body, template, **options))
        )

    def _truncate(self, body: GenerationRequest, token_ids: list[int]) -> list[int]:
        """The tokens that the request wants to keep of a prompt. Raises InputError if that is none."""
        num_kept = body.truncate_prompt_tokens
        if num_kept is None:
            return token_ids
        if num_kept == 0:
            raise InputError(
                "truncate_prompt_tokens",
                "Invalid value for 'truncate_prompt_tokens': it is the number of prompt tokens to keep, or -1.",
            )
        if num_kept == -1:
            most_tokens = 1 if body.most_tokens is None else body.most_tokens
            num_kept = max(self._engine.max_model_len - most_tokens, 1)
        return token_ids[:num_kept] if body.truncation_side == "right" else token_ids[-num_kept:]


def _size(message: ChatMessage) -> int:
    """How many characters of a text cost as much as this message."""
    texts = [part.text for part in message.content] if isinstance(message.content, list) else [message.content]
    return sum(CHARACTERS_OF_A_MESSAGE + len(text or "") for text in texts)


def _check_body(body: GenerationRequest, model_names: list[str]) -> None:
    """Raise InputError for a model that is not served, and for fields that do not go together."""
    if body.model not in model_names:
        raise UnknownModelError(body.model)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options", "'stream_options' is only allowed when 'stream' is true.")
    if body.prompt_logprobs is not None and body.stream:
        raise InputError("prompt_logprobs", "'prompt_logprobs' is not available when 'stream' is true.")
    if isinstance(body, ChatCompletionRequest) and body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if body.logprob_token_ids is not None and (body.num_logprobs is None or not body.generates):
        needed = "'logprobs' is set" if body.generates else "there is any output"
        raise InputError("logprob_token_ids", f"'logprob_token_ids' is only allowed when {needed}.")
    if body.seed is not None and not SMALLEST_SEED <= body.seed <= LARGEST_SEED:
        sign, bound = (">=", SMALLEST_SEED) if body.seed < SMALLEST_SEED else ("<=", LARGEST_SEED)
        raise out_of_bounds("seed", sign, bound, body.seed)
    if isinstance(body, CompletionRequest):
        if not body.generates and not body.echo:
            raise InputError("max_tokens", "Invalid value for 'max_tokens': 0 is only allowed when 'echo' is true.")
        # In a beam search it is the number of beams.
        if not body.use_beam_search and body.best_of not in (None, body.n or 1):
            raise InputError(
                "best_of", "'best_of' is not supported yet; leave it out or set it to the same value as 'n'."
            )


def read_prompts(prompt: str | list[Any], vocab_size: int, param: str) -> list[str | list[int]]:
    """The prompts in a text, token ids, or a list of texts and lists of token ids. Raises InputError."""
    is_single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts: list[Any] = [prompt] if is_single else list(prompt)
    if not prompts:
        raise InputError(param, f"Invalid value for '{param}': it is empty.")
    for index, each in enumerate(prompts):
        path = param if is_single else f"{param}[{index}]"
        if not isinstance(each, str | list):
            raise InvalidTypeError(path, f"Invalid type for '{path}': expected a string or a list of integers.")
        if not each:
            raise InputError(path, f"Invalid value for '{path}': it is empty.")
        if isinstance(each, list):
            check_token_ids(each, vocab_size, path)
    return prompts


def check_token_ids(token_ids: Iterable[Any], vocab_size: int, param: str) -> None:
    """Raise InputError for the first item in `param` that is not a token id of the model."""
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            path = f"{param}[{index}]"
            raise InvalidTypeError(path, f"Invalid type for '{path}': expected an integer.")
        if not 0 <= token_id < vocab_size:
            raise _unknown_token(f"{param}[{index}]", token_id, vocab_size)


def _unknown_token(param: str, token_id: int, vocab_size: int) -> InputError:
    return InputError(
        param,
        f"Invalid value for '{param}': token id {str(token_id)[:_MAX_DIGITS]} is out of vocabulary, which has the "
        f"{vocab_size} ids from 0 to {vocab_size - 1}.",
    )


def _num_logprobs(asked: int | None, vocab_size: int) -> int | None:
    if asked is None:
        return None
    return vocab_size if asked < 0 else min(asked, vocab_size)
