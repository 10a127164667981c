"""Chat templates render as transformers renders them."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from eventlm.errors import CheckpointError
from eventlm.server.chat_template import ChatTemplate, ChatTemplateError

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
