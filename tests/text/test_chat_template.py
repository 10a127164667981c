"""Chat templates render as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from eventlm.errors import CheckpointError
from eventlm.text.chat_template import ChatTemplate, ChatTemplateError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """\
{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set content = '<|start|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + '<|eot|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
    {{ content }}
{% endfor %}
{{ eos_token }}
"""
MODERN = """\
{%- set ns = namespace(last=none, found=false) -%}
{%- for message in messages[::-1] -%}
  {%- if message.role == 'user' and not ns.found -%}{%- set ns.last = loop.index0 -%}{%- set ns.found = true -%}
  {%- endif -%}
{%- endfor -%}
{%- macro show(message) -%}[{{ message.role|upper }}:{{ message.content|trim }}]{%- endmacro -%}
{%- for message in messages -%}
  {%- if message.content.startswith('skip') -%}{%- continue -%}{%- endif -%}
  {%- if message.role == 'assistant' -%}{% generation %}{{ show(message) }}{% endgeneration %}
  {%- else -%}{{ show(message) }}{%- endif -%}
  {%- if message.content == 'halt' -%}{%- break -%}{%- endif -%}
{%- endfor -%}
{{ messages|tojson }}{{ {'b': '<&é🙂>', 'a': 1}|tojson(indent=2) }}
{{ strftime_now('%Y') }}{{ tools is none }}
{{ ns.last }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}
"""
CONVERSATIONS = [
    [{"role": "user", "content": 'Hi <b>&"quoted"</b> é🙂'}],
    [
        {"role": "system", "content": "  Be brief.\n"},
        {"role": "user", "content": "skip this"},
        {"role": "assistant", "content": "halt"},
        {"role": "user", "content": "What now?"},
    ],
]


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [CHATML, LLAMA, MODERN], ids=["chatml", "llama", "modern"])
def test_same_text_as_transformers(theirs, source, add_generation_prompt, variables, conversation) -> None:
    expected = theirs.apply_chat_template(
        conversation,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    rendered = template.render(conversation, add_generation_prompt=add_generation_prompt, variables=variables)
    assert rendered == expected


TOOLS = """\
{%- if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor -%}
{%- for message in messages -%}
<{{ message.role }}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.thinking }}{{ message.content -}}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
{%- if message.role == "tool" %}({{ message.tool_call_id }}){% endif %}</{{ message.role }}>
{% endfor -%}
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
WITH_TOOLS: list[Any] = [
    {"role": "user", "content": "1+é?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm", "thinking": "hm"},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": " It is  "},
]


def test_tools_and_documents_as_in_transformers(theirs) -> None:
    options: Any = {
        "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
        "documents": [{"title": "T", "text": "<x>"}],
    }
    for continues in (False, True):
        expected = theirs.apply_chat_template(
            WITH_TOOLS, chat_template=TOOLS, tokenize=False, continue_final_message=continues, **options
        )
        assert '"arguments": {"a": 1, "b": "é"}' in expected
        found = ChatTemplate(TOOLS, {}).render(
            WITH_TOOLS, add_generation_prompt=False, continue_final_message=continues, **options
        )
        assert found == expected


@pytest.mark.parametrize("final", ["Sure,", " Sure, \n", "user", "", "a 🙂", "x" * 99 + "  "])
@pytest.mark.parametrize("source", [CHATML, LLAMA, TOOLS], ids=["chatml", "llama", "tools"])
def test_continued_as_in_transformers(theirs, source: str, final: str) -> None:
    messages = [{"role": "user", "content": "Sure, user"}, {"role": "assistant", "content": final}]
    expected = theirs.apply_chat_template(
        messages, chat_template=source, tokenize=False, continue_final_message=True, add_generation_prompt=False
    )
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages[1]["content"] == final


def test_a_final_message_that_is_not_shown_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="does not show the final message"):
        ChatTemplate("{{ messages[0].content }}", {}).render([*WITH_TOOLS], continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ],
)
def test_a_template_that_refuses_says_why(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_an_error_of_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% for %}", {})
