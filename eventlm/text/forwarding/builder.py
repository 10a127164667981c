"""Builds the requests that other servers answer."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from eventlm.engine.backend import ForwardedRequest
from eventlm.engine.request import Request
from eventlm.errors import InputError
from eventlm.sampling_params import SamplingParams
from eventlm.text.chat.messages import render_chat
from eventlm.text.decoding import convert_request
from eventlm.text.echo import Echo
from eventlm.text.forwarding.bodies import ForwardedChatRequest, encode_fields, forwarded_fields
from eventlm.text.forwarding.conversation import conversation_text
from eventlm.text.forwarding.piece_tokenizer import PieceTokenizer
from eventlm.text.protocol import (
    MAX_GROUP_SEQUENCES,
    USED_BY_TEMPLATES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from eventlm.text.request_builder import RequestBuilder, read_prompts
from eventlm.text.tools.message import MessageFormat


class _Conversation(NamedTuple):
    """The token ids of a conversation. is_known: whether they are those of the backend."""

    token_ids: list[int]
    is_known: bool


class ForwardingBuilder(RequestBuilder):
    """Checks what is this server's own. The rest is for the backend to check: parameters, structures and tools.

    Where the backend's own tokens of a prompt are not known, what stands for them is cut to the context, and it is the
    backend that says whether a prompt is too long.
    """

    async def chat(
        self, body: ChatCompletionRequest, received_ns: int, *, param: str = "messages", **scheduling: Any
    ) -> Request:
        params = self.params(body)
        fields = forwarded_fields(body)
        data = encode_fields(fields)
        token_ids, is_known = await self._conversation(body, fields, len(data))
        shows_reasoning = body.include_reasoning is not False
        return self.request(
            params,
            token_ids if is_known else self._cut(params, token_ids),
            param=param,
            cache_salt=body.cache_salt,
            message_format=b"" if shows_reasoning else msgspec.msgpack.encode(MessageFormat(shows_reasoning=False)),
            model=body.model,
            forwarded=ForwardedRequest(endpoint="chat", body=data),
            received_ns=received_ns,
            **scheduling,
        )

    async def completions(
        self, body: CompletionRequest, received_ns: int, **scheduling: Any
    ) -> tuple[list[Request], list[Echo]]:
        params = self.params(body)
        if not body.generates:
            raise InputError(
                "max_tokens", "Invalid value for 'max_tokens': it is at least 1 for a model that other servers run."
            )
        fields = forwarded_fields(body)
        if params.n > 1 and "best_of" in fields:
            # Each choice is a request of its own there.
            raise InputError("best_of", "'best_of' is only available when 'n' is 1; leave it out.")
        prompts = read_prompts(body.prompt, self._vocab_size, "prompt")
        if len(prompts) * params.n > MAX_GROUP_SEQUENCES:
            raise InputError("prompt", f"Invalid value for 'prompt': prompts times n is at most {MAX_GROUP_SEQUENCES}.")
        special = body.add_special_tokens is not False
        group = []
        for prompt in prompts:
            group.append(
                self.request(
                    params,
                    prompt
                    if isinstance(prompt, list)
                    else await self.encoder.encode(prompt, add_special_tokens=special),
                    param="prompt",
                    cache_salt=body.cache_salt,
                    model=body.model,
                    forwarded=ForwardedRequest(endpoint="completions", body=encode_fields(fields | {"prompt": prompt})),
                    received_ns=received_ns,
                    **scheduling,
                )
            )
        return group, []

    def params(self, body: GenerationRequest) -> SamplingParams:
        """What the engine needs, and what replies repeat. Raises InputError."""
        params = super().params(body)
        return SamplingParams(
            n=params.n,
            seed=params.seed,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
        )

    def request(self, params: SamplingParams, prompt_token_ids: list[int], **fields: Any) -> Request:
        if isinstance(self._tokenizer, PieceTokenizer):
            longest = self._engine.max_model_len - 1
            if params.max_tokens is not None and params.max_tokens > longest:
                params = structs.replace(params, max_tokens=max(longest, 1))
            prompt_token_ids = self._cut(params, prompt_token_ids)
        return super().request(params, prompt_token_ids, **fields)

    async def encode_messages(self, body: ChatCompletionRequest) -> list[int]:
        fields = forwarded_fields(body)
        return (await self._conversation(body, fields, len(encode_fields(fields)))).token_ids

    async def _conversation(self, body: ChatCompletionRequest, fields: dict[str, Any], size: int) -> _Conversation:
        def encode() -> _Conversation:
            text = self._written_by_template(body, fields)
            is_known = text is not None
            text = conversation_text(fields) if text is None else text
            return _Conversation(self._tokenizer.encode(text, add_special_tokens=False), is_known)

        return await self.encoder.run(size, encode)

    def _written_by_template(self, body: ChatCompletionRequest, fields: dict[str, Any]) -> str | None:
        """A conversation as its model's template writes it; None if that is not known, or does not know all of it."""
        template = self._tokenizer.chat_template
        if template is None or "chat_template" in fields:
            return None
        try:
            if isinstance(body, ForwardedChatRequest):
                used = {name: fields[name] for name in ("messages", *USED_BY_TEMPLATES) if name in fields}
                body = convert_request(used, ChatCompletionRequest, {})
            return render_chat(body, template, tools=body.tools)
        except InputError:
            return None

    def _cut(self, params: SamplingParams, token_ids: list[int]) -> list[int]:
        """As much of a prompt as fits the context."""
        return token_ids[: max(self._engine.max_model_len - (params.max_tokens or 1), 1)]
