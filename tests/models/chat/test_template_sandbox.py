# ruff: noqa: E501  (templates are kept in their original form)
"""Chat templates: equal to the reference implementation, without access to Python, bounded in time and memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models as backends
from transformers import PreTrainedTokenizerFast

from polyhead.models import chat
from polyhead.models.chat import ChatTemplate, template_functions, template_sandbox
from polyhead.models.core.errors import EncodingError, TemplateError

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}\n"
    "{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}\n"
    "{{- 'Today Date: ' + date_string + '\n\n' }}{{- system_message }}{{- '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n"
    "    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}\n"
    "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n"
    "        {%- set call = message.tool_calls[0].function %}\n"
    "        {{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}\n"
    "    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}\n"
)
TOOLS = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n"
    "        {{- messages[0]['content'] }}\n    {%- else %}\n        {{- 'You are Qwen.' }}\n    {%- endif %}\n"
    "    {{- '\\n\\n# Tools\\n<tools>' }}\n    {%- for tool in tools %}\n        {{- '\\n' }}\n"
    "        {{- tool | tojson }}\n    {%- endfor %}\n    {{- '\\n</tools><|im_end|>\\n' }}\n{%- endif %}\n"
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n    {%- set index = (messages|length - 1) - loop.index0 %}\n"
    "    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string %}\n"
    "        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n"
    "    {%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n"
    "    {%- if (message.role == 'user') or (message.role == 'system' and not loop.first)"
    " or (message.role == 'assistant' and not message.tool_calls) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- elif message.role == 'assistant' %}\n        {{- '<|im_start|>' + message.role }}\n"
    "        {%- set text = message.content or '' %}\n        {%- if '</think>' in text %}\n"
    "            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}\n        {%- endif %}\n"
    "        {{- '\\n' ~ text }}\n        {%- for tool_call in message.tool_calls %}\n"
    "            {%- set tool_call = tool_call.function %}\n"
    '            {{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}{{- \'", "arguments": \' }}\n'
    "            {{- tool_call.arguments | tojson(indent=2) | safe }}{{- '}\\n</tool_call>' }}\n        {%- endfor %}\n"
    "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}\n"
    "        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}\n"
    "        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}\n    {%- endif %}\n"
    "{%- endfor %}\n{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
TURNS = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- set loop_messages = messages[1:] -%}"
    "{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}"
    "{%- for message in loop_messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}"
    "{%- endif -%}{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{% generation %}{{ message['content'] | trim }}{% endgeneration %}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}"
    "{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}"
    "{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}{%- endif -%}"
)
ODD = (
    "{% for m in messages if m.role != 'nobody' %}{% if loop.index > 3 %}{% break %}{% endif %}"
    "{{ '%s: %s' % (m.role|title, m.content|upper) }}|{{ m.content|replace('e', 'EE')|indent(2) }}|{{ loop.length }}\n"
    "{% else %}none{% endfor %}{{ messages|map(attribute='role')|unique|join(', ') }}"
    "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ dict(a=1, b=[1.5, none, true])|tojson }}"
    "{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{{ twice('é<&') }}{{ [1, 2] + [3] }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ {'k': ()} }}"
    "{{ 'a-b'.split('-') }}{{ '{} {:>4}'.format('x', 5) }}{{ messages[-1].content[:3] }}{{ (1, 2)|last }}{{ range(3)|list }}"
    "{{ 'x' if tools is none else 'y' }}{{ documents is none }}{{ undefined_thing }}{{ '<b>'|e ~ '<' }}{{ 3 in [1, 2, 3] }}"
    "{% set block %}{{ messages|length }}!{% endset %}{{ block|center(9) }}{% for k, v in {'a': 1}|items %}{{ k }}{{ v }}{% endfor %}"
    "{{ messages|unique(attribute='role')|map(attribute='content')|list }}{{ ['b', 'B', 1, 1.0, none]|unique|list }}"
    "{{ ['b', 'B']|unique(true)|list }}{{ 'y' if [1]|select('string') else 'n' }}{{ dict([['k', 1], ('l', 2)], m=3) }}"
    "{{ dict({'k': 1}, environment=2) }}{{ namespace({'k': 1}, l=2).k }}{{ namespace([('k', 1)]).k }}"
    "{{ messages|sort(attribute='role,content')|map(attribute='role')|list }}{{ ['b', 'A', 'a']|sort(true) }}"
    "{{ ['b', 'A', 'a']|sort(case_sensitive=true) }}{{ [1, 3, 2]|max }}{{ ['b', 'A']|min }}{{ []|max }}"
    "{{ (messages|max(attribute='role')).role }}{{ ['a', 'B']|min(true) }}{{ {'b': 1, 'A': 2}|dictsort }}"
    "{{ {'b': 1, 'A': 2}|dictsort(by='value', reverse=true) }}{{ messages|join('-', attribute='role') }}{{ [1]|join(2) }}"
    "{% set calls = [twice] %}{{ calls[0](*['z']) }}{{ 1 < 2 <= 2 != 3 }}{{ messages[::-1]|length }}{{ 'abc'[1:] }}"
    "{{ {(1, 2): 'x'} }}{{ {'a': {'b': [()]}} }}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "tools": TOOLS, "turns": TURNS, "odd": ODD}

USER = {"role": "user", "content": "  Hello <there> & ünïcode 你好 😀 \n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm</think>\n\nHi!"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei €"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {"type": "object"}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "both": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
}


def reference() -> PreTrainedTokenizerFast:
    backend = Backend(backends.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_equals_the_reference(template: str, chat: str, prompt: bool) -> None:
    source, messages = TEMPLATES[template], CHATS[chat]
    expected = reference().apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=prompt
    )
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert ours.render(messages, add_generation_prompt=prompt) == expected
    assert expected  # an empty output would compare nothing


@pytest.mark.parametrize("template", ["headers", "tools"])
def test_tools_equal_the_reference(template: str) -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
    source = TEMPLATES[template]
    expected = reference().apply_chat_template(
        messages, tools=[TOOL], chat_template=source, tokenize=False, add_generation_prompt=True, date_string="today"
    )
    ours = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    assert ours.render(messages, variables={"tools": [TOOL], "date_string": "today"}) == expected
    assert "zwei €" in expected


def test_date_is_local_time() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == time.strftime("%Y")


BOMBS = {
    "string times": "{{ 'a' * 10**9 }}",
    "times string": "{{ 1000000000 * 'a' }}",
    "list times": "{% set x = [1] * 1000000000 %}",
    "doubling ~": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling +": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "nested lists": "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}",
    "nested dicts": "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}",
    "nested tuples": "{% set ns = namespace(x=(1,)) %}{% for i in range(99) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "nested calls": "{% set ns = namespace(x={}) %}{% for i in range(99) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "nested views": "{% set d = {'a': 'a' * 9000} %}{{ [d.items()] * 9000 }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%.1000000000f' | format(1.0) }}",
    "many directives": "{{ ('%s' * 9000) % ('a' * 9000) }}{{ ('%(a)s' * 9000) % {'a': 'a' * 9000} }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format nested": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "format repeated": "{{ ('{0}' * 9000).format('a' * 9000) }}",
    "percents": "{{ ('%' * 999999) % 1 }}",
    "flags": "{{ ('%' ~ '0' * 999998) % 1 }}",
    "colons": "{{ ('{' ~ 'a:' * 499998).format(1) }}",
    "digits": "{{ ('%(a)d' * 99999) % {'a': 2 ** 8000} }}",
    "many digits": "{{ [2 ** 8000] * 99999 }}",
    "strip": "{% set b = 'b' * 499999 ~ 'a' %}{{ ('a' * 999999).strip(b) }}",
    "trim": "{% set b = 'b' * 499999 ~ 'a' %}{{ ('a' * 999999) | trim(b) }}",
    "search from the end": "{{ ('a' * 999999).rfind('b' ~ 'a' * 499999) }}",
    "split from the end": "{{ ('a' * 999999).rsplit(sep='b' ~ 'a' * 499999) }}",
    "replace": "{% set x = 'a' * 9000 %}{{ x | replace('a', x) }}",
    "replace nothing": "{% set x = 'a' * 9000 %}{{ x.replace('', x) }}",
    "join": "{{ range(99999) | join('a' * 99999) }}",
    "join method": "{{ ('a' * 99999).join(range(9999) | map('string')) }}",
    "join of keywords": "{{ ('a' * 99999).join(['b'] * 9999) }}",
    "indent": "{{ ('\n' * 9999) | indent(99999) }}",
    "json indent": "{{ [[[1]]] | tojson(indent=1000000000) }}",
    "json separators": "{{ range(9999) | list | tojson(separators=('a' * 99999, ':')) }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "range": "{{ range(10 ** 12) | list }}",
    "round": "{{ 1.5 | round(1000000000, 'floor') }}",
    "bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "date": "{{ strftime_now('%c' * 99999) }}",
    "block": "{% set y = 'a' * 999999 %}{% set x %}{% for i in range(99999) %}{{ y }}{% endfor %}{% endset %}",
    "kept in a block": "{% set x %}{% for i in range(99999) %}{{ 'a' * 99999 ~ i }}{% endfor %}{% endset %}",
    "filter block": "{% filter upper %}{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}{% endfilter %}",
    "list of texts": "{% set l = range(99999) | map('replace', '1', 'a' * 99999) | list %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "empty loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "busy loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
    "slices": "{% set a = range(50000) | list %}{% for i in range(99999) %}{% set b = a[:] %}{% endfor %}",
    "sorting": "{% for i in range(99999) %}{% set b = range(50000) | sort %}{% endfor %}",
    "comparing": "{% set a = range(50000) | list %}{% set b = range(50000) | list %}"
    "{% for i in range(99999) if a == b and a == b %}{% endfor %}",
    "unique of unique": "{% set ns = namespace(g=range(99999)) %}{% for i in range(300) %}{% set ns.g = ns.g | unique %}"
    "{% endfor %}{{ ns.g | max }}",
    "select of select": "{% set ns = namespace(g=range(99999)) %}{% for i in range(400) %}{% set ns.g = ns.g | select %}"
    "{% endfor %}{% for i in range(9) %}{{ ns.g | max }}{% endfor %}",
    "unique of one hash": "{% set m = 2 ** 61 - 1 %}{{ range(0, m * 40000, m) | unique | list | length }}",
    "long test of a loop": "{% for i in range(1, 99999) if "
    + " and ".join(["(" + " and ".join(["i.real"] * 50) + ")"] * 40)
    + " %}{% endfor %}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
}


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds of processor time for one rendering: many templates take all of it."""
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    return 0.2


@pytest.mark.parametrize("bomb", BOMBS)
def test_every_template_is_bounded_in_time_and_memory(bomb: str, short_time: float) -> None:
    started = time.thread_time()
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(BOMBS[bomb]).render([USER])
    assert time.thread_time() - started < short_time + 3


def test_the_memory_of_the_filter_unique_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ range(100) | unique | list | length }}")
    assert template.render([USER]) == "100"
    monkeypatch.setattr("polyhead.models.chat.template_functions.KEY_SIZE", 1_000_000)
    with pytest.raises(TemplateError, match="64,000,000 characters in all"):
        template.render([USER])


VALUES = "{% set ns = namespace(x=('a',), y=('b',)) %}"
# Each doubles what `ns.x` holds, without a copy: what is shared must count as often as it is reached.
DOUBLINGS = {
    "tuple": "{% set ns.x = (ns.x, ns.x) %}",
    "list": "{% set ns.x = [ns.x, ns.x] %}",
    "object": "{% set ns.x = {'a': ns.x, 'b': ns.x} %}",
    "function": "{% set ns.x = dict(a=ns.x, b=ns.x) %}",
    "values": "{% set ns.x = {'a': ns.x, 'b': ns.x}.values() %}",
    "items": "{% set ns.x = {'a': ns.x, 'b': ns.x} | items | list %}",
    "unpacked": "{% set ns.x, ns.y = (ns.x, ns.y), (ns.y, ns.x) %}",
    "with": "{% with a = ns.x, b = ns.x %}{% set ns.x = (a, b) %}{% endwith %}",
    "block": "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
    "repeated": "{% set ns.x = [ns.x] * 2 %}",
    "added": "{% set ns.x = [ns.x] + [ns.x] %}",
    "joined": "{% set ns.x = ns.x ~ ns.x %}",
    "sliced": "{% set ns.x = [ns.x, ns.x, 1][:2] %}",
    "a default of items": "{% set ns.x = [nope, nope] | map('default', ns.x) | list %}",
    "cycle": "{% for i in [1] %}{% set ns.x = loop.cycle((ns.x, ns.x)) %}{% endfor %}",
    "item of a loop": "{% for a in [(ns.x, ns.x)] %}{% set ns.x = a %}{% endfor %}",
    "parameter": "{% macro f(a) %}{% set ns.x = a %}{% endmacro %}{{ f(*[[ns.x, ns.x]]) }}",
    "default of a parameter": "{% macro f(a=(ns.x, ns.x)) %}{% set ns.x = a %}{% endmacro %}{{ f() }}",
    "parameter of a call": "{% macro f() %}{{ caller((ns.x, ns.x)) }}{% endmacro %}"
    "{% call(a) f() %}{% set ns.x = a %}{% endcall %}",
    "format": "{% set ns.x = '{0}{0}'.format(ns.x) %}",
    "percent": "{% set ns.x = '%s%s' % (ns.x, ns.x) %}",
    "replace": "{% set ns.x = 'aa'.replace('a', ns.x | string) %}",
}


@pytest.mark.parametrize("doubling", DOUBLINGS)
def test_a_value_is_measured_however_it_is_made(doubling: str) -> None:
    source = VALUES + "{% for i in range(40) %}" + DOUBLINGS[doubling] + "{% endfor %}"
    with pytest.raises(TemplateError, match="makes a value of more than 1,000,000 characters"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize("name", ["varargs", "kwargs"])
@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{% set ns.x = NAME %}{% endmacro %}", "{% call f() %}{{ NAME | length }}{% endcall %}"],
)
def test_a_macro_has_named_parameters_only(source: str, name: str) -> None:
    with pytest.raises(TemplateError, match="line 2: a macro reads varargs or kwargs"):
        ChatTemplate("\n" + source.replace("NAME", name))
    source = "{% macro f(NAME) %}{{ NAME }}{% endmacro %}{{ NAME }}{{ f(1) }}{{ f(NAME=2) }}"
    assert ChatTemplate(source.replace("NAME", name)).render([USER]) == "12"
    with pytest.raises(TemplateError, match="takes not more than 0 argument"):
        ChatTemplate("{% macro f() %}{% endmacro %}{{ f(1) }}").render([USER])


@pytest.mark.parametrize("thing", ["ns", "loop", "self", "range", "'a'.upper", "[1] | reverse"])
@pytest.mark.parametrize(
    "source",
    [
        "[THING]",
        "(THING,)",
        "{'a': THING}",
        "dict(a=THING)",
        "[] + [THING]",
        "'{0}'.format(THING)",
        "'%s %s' % (1, THING)",
        "'%s' | format(THING)",
        "1 ~ THING",
        "[nope] | map('default', THING) | list",
        "[nope] | map('default', THING) | join(attribute='x')",
        "[nope] | map('default', THING) | sort(attribute='x')",
        "[nope] | map('default', THING) | first",
        "loop.changed(THING)",
        "'' if THING is string else (loop | list)",
        "'' if THING is string else (loop | first)",
    ],
)
def test_lists_and_dictionaries_hold_plain_values_only(source: str, thing: str) -> None:
    """An attribute of another value could hide what a filter then compares or joins for each item."""
    source = (
        "{% set ns = namespace(x=1) %}{% for i in [1, 2] %}{{ " + source.replace("THING", thing) + " }}{% endfor %}"
    )
    with pytest.raises(TemplateError, match=r"puts a .* into a list, a dictionary or a text"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "value", ["{'a': 1}.keys()", "{'a': 1}.items()", "range(3)", "twice", "self", "raise_exception"]
)
@pytest.mark.parametrize("name", ["mapping", "name", "arguments", "start", "x"])
def test_attributes_of_other_values_are_undefined(value: str, name: str) -> None:
    source = "{% macro twice(a) %}{% endmacro %}{{ (VALUE).NAME is defined }}{{ (VALUE)['NAME'] is defined }}"
    assert ChatTemplate(source.replace("VALUE", value).replace("NAME", name)).render([USER]) == "FalseFalse"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ [{'x': b}, {'x': b}] | sort(attribute='" + "x," * 20 + "x') }}", "value of more than 2,000 characters"),
        ("{{ range(5) | map(attribute='x', default=b) | sort }}", "value of more than 2,000 characters"),
        ("{{ range(5) | map(attribute='x', default=b) | min }}", "value of more than 2,000 characters"),
        ("{{ range(5) | map(attribute='x', default=b) | max }}", "value of more than 2,000 characters"),
        ("{{ range(5) | map(attribute='x', default=b) | join }}", "value of more than 2,000 characters"),
        ("{% for i in [1] %}{{ loop.changed(b, b, b, b, b) }}{% endfor %}", "value of more than 2,000 characters"),
        ("{{ range(5) | groupby('x', default=b) }}", "No filter named 'groupby'"),
        ("{{ namespace(items=b.copy) | dictsort }}", "sorts a Namespace with dictsort"),
        ("{{ {(1, b * 2): 1} }}", "a tuple of more than 1,000 characters as a key"),
        ("{{ dict([((1, b * 2), 1)]) }}", "a tuple of more than 1,000 characters as a key"),
        ("{{ [(1, b * 2)] | unique | list }}", "a tuple of more than 1,000 characters as a key"),
        ("{{ {1: 2}.keys() - [1] }}", "subtracts with the keys or items of a dictionary"),
        ("{{ [1] - {1: 2}.items() }}", "subtracts with the keys or items of a dictionary"),
        ("{{ [range(2 ** 3000, 2 ** 3000 + 1)] }}", "value of more than 2,000 characters"),
    ],
)
def test_what_one_step_compares_or_hashes_is_bounded(
    source: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_functions, "MAX_CHARACTERS", 2000)
    monkeypatch.setattr(template_sandbox, "SMALL_SIZE", 20)
    with pytest.raises(TemplateError, match=message):
        ChatTemplate("{% set b = [0] * 70 %}" + source).render([USER])


def test_the_name_of_a_macro_counts_as_its_text() -> None:
    source = "{% macro " + "f" * 90_000 + "() %}{% endmacro %}{% set m = " + "f" * 90_000 + " %}"
    assert ChatTemplate(source + "{{ [m] | length }}").render([USER]) == "1"
    for expression in ("[m] * 12", "range(12) | join(m)", "(m, m, m, m, m, m, m, m, m, m, m, m)"):
        with pytest.raises(TemplateError, match="1,000,000 characters"):
            ChatTemplate(source + "{{ " + expression + " }}").render([USER])


def test_the_depth_of_values_is_limited() -> None:
    source = "{% set ns = namespace(x=()) %}{% for i in range(DEPTH) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ ns.x }}"
    written = ChatTemplate(source.replace("DEPTH", "190")).render([USER])
    assert written.startswith("(" * 191)
    with pytest.raises(TemplateError, match="nests values more than 200 levels deep"):
        ChatTemplate(source.replace("DEPTH", "210")).render([USER])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each step that the sandboxes count: 0, or the characters that it copies."""
    counted: list[int] = []
    count, add = template_sandbox.Sandbox.count_step, template_sandbox.Sandbox.add_work

    def count_step(sandbox: template_sandbox.Sandbox) -> None:
        counted.append(0)
        count(sandbox)

    def add_work(sandbox: template_sandbox.Sandbox, size: int) -> None:
        counted.append(size)
        add(sandbox, size)

    monkeypatch.setattr(template_sandbox.Sandbox, "count_step", count_step)
    monkeypatch.setattr(template_sandbox.Sandbox, "add_work", add_work)
    return counted


def test_each_comparison_of_a_chain_is_a_step(steps: list[int]) -> None:
    ChatTemplate("{% set x = " + " == ".join("1" * 101) + " %}").render([USER])
    assert len(steps) >= 100


@pytest.mark.parametrize("function", ["dict(p)", "namespace(p)", "p | map('first') | unique | list"])
def test_each_comparison_of_keys_of_one_hash_is_a_step(function: str, steps: list[int]) -> None:
    pairs = ", ".join(f"({(2**61 - 1) * number}, 1)" for number in range(1, 101))
    ChatTemplate("{% set p = [" + pairs + "] %}{% set d = " + function + " %}").render([USER])
    assert len(steps) >= 100 * 99 / 2


def test_copies_count_as_work(steps: list[int]) -> None:
    ChatTemplate("{% set x = messages[:1] %}{% set y = 'abc'[1:] %}{% set z = namespace(messages[0]) %}").render([USER])
    assert [size for size in steps if size] == [8, 2, 2 * 8 * 2]


def test_the_slices_of_one_expression_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_WORK", 64_000)
    with pytest.raises(TemplateError, match="makes values of more than 64,000 characters in all"):
        ChatTemplate(
            "{% set a = 'a' * 20000 %}{% set x = a[1:] is string and a[1:] is string and a[1:] is string %}"
        ).render([USER])


def test_constant_expressions_are_not_computed_when_a_template_is_compiled(steps: list[int]) -> None:
    template = ChatTemplate("{{ 'a' | center(9) | length }}{{ [1] == [1] == [1] }}")
    assert not steps
    assert template.render([USER]) == "9True"


def test_the_length_of_the_output_is_limited() -> None:
    near = {"role": "user", "content": "a" * 900_000}
    assert len(ChatTemplate("{{ messages[0].content }}").render([near])) == 900_000
    with pytest.raises(TemplateError, match="1,000,000"):
        ChatTemplate("{{ messages[0].content }}{{ messages[0].content }}").render([near])


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ '' | attr('__class__') | attr('__mro__') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__globals__.json }}",
    "{{ raise_exception.__globals__.json }}",
    "{{ range.__globals__['x'] }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 1}) }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(a=1) }}",
    "{{ messages[0].__setitem__('a', 1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__class__=1) }}",
    "{{ (messages | map('string')).gi_frame.f_globals }}",
    "{{ [''] | map(attribute='__class__.__mro__') | list | first | list }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_expression_escapes_the_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize("name", ["__class__", "__init__", "_private", "__dict__", "__globals__"])
@pytest.mark.parametrize("thing", ["''", "messages", "raise_exception", "dict", "namespace()", "loop", "1", "self"])
def test_internal_attributes_are_undefined(thing: str, name: str) -> None:
    source = "{% for i in [1] %}{{ THING.NAME is defined }}{{ THING['NAME'] is defined }}{% endfor %}"
    assert ChatTemplate(source.replace("THING", thing).replace("NAME", name)).render([USER]) == "FalseFalse"


def test_messages_are_never_changed() -> None:
    messages = [{"role": "user", "content": "x"}]
    ChatTemplate("{% set messages = messages + [1] %}{{ messages }}").render(messages)
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for x in %}", "line 1"),
        ("a\n{{ x | nosuchfilter }}", "line 2.*nosuchfilter"),
        ("{{ " + "(" * 5000 + " }}", "cannot be read"),
        ("x" * 200_001, "200,001 characters"),
        ("{{ raise_exception('Roles must alternate') }}", "refuses the messages: Roles must alternate"),
        ("{{ messages[0].nope.x }}", "nope"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_errors_have_readable_messages(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(("begin", "unit", "end"), [("{{a", "<a", "}}"), ("{{[", "a,", "]}}"), ("", "{{a}}", "")])
def test_the_size_of_a_compiled_template_is_bounded(begin: str, unit: str, end: str) -> None:
    ChatTemplate(begin + unit * 3000 + end)
    ChatTemplate(CHATML + "text " * 20_000)
    for sources in ({"source": begin + unit * 5000 + end}, {"source": "", "tool_use": begin + unit * 5000 + end}):
        with pytest.raises(TemplateError, match="has more than 10,000 names, operators and other tokens"):
            ChatTemplate(**sources)


def test_control_tokens_in_field_names_are_quoted() -> None:
    written = ChatTemplate("{{ tools[0] | tojson }}").render(
        [{"role": "user"}],
        variables={"tools": [{"<end>": "<end>"}]},
        quote=lambda text: text.replace("<end>", "<-end>"),
    )
    assert written == '{"<-end>": "<-end>"}'


def test_lone_surrogates_are_named() -> None:
    template = ChatTemplate(CHATML)
    with pytest.raises(EncodingError, match=r"messages\[1\]\.content.*U\+D83D.*position 2"):
        template.render([USER, {"role": "user", "content": "ab\ud83d"}])


def test_only_plain_values_are_accepted() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    with pytest.raises(TemplateError, match=r"messages\[0\]\.content is a object"):
        template.render([{"role": "user", "content": object()}])
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(TemplateError):
        template.render([{"role": "user", "content": deep}])


@pytest.mark.usefixtures("short_time")
def test_threads_share_a_template() -> None:
    template = ChatTemplate(CHATML)
    slow = ChatTemplate(BOMBS["busy loop"])

    def render(number: int) -> str:
        if number == 0:
            with pytest.raises(TemplateError):
                slow.render([])
        return template.render([{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(4) as pool:
        for number, prompt in enumerate(pool.map(render, range(200))):
            assert f"user\n{number}<|im_end|>" in prompt


class UnreadObject(dict[str, int]):
    """An object whose items may not be looked at."""

    def values(self) -> Any:
        pytest.fail("its items are copied")


class UnreadList(list[int]):
    def __iter__(self) -> Any:
        pytest.fail("its items are copied")


def test_counting_the_size_of_a_value_stops_before_its_items_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert template_functions.value_size({"a": [1, 2], "b": "cd"}) == 2 * 8 * 2 + 2 + 2 * 8 + 2 + 2
    monkeypatch.setattr(template_functions, "MAX_CHARACTERS", 8 * 9)
    for value in (UnreadObject(dict.fromkeys(map(str, range(10)), 1)), UnreadList(range(10))):
        assert template_functions.value_size(value) > template_functions.MAX_CHARACTERS


@pytest.mark.parametrize("given", [{"source": "t " * 100_001}, {"source": "x", "tool_use": "t " * 100_001}])
def test_a_long_template_is_refused_before_anything_searches_it(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search of a hundred million characters is one call, which keeps the interpreter for seconds."""
    searched = list[str]()
    monkeypatch.setattr(chat, "detect_format", searched.append)
    with pytest.raises(TemplateError, match="has 200,002 characters; at most 200,000 are read"):
        ChatTemplate(**given)
    assert not searched
