"""Chat templates against transformers' own renderer, malformed chats, and templates that mean harm."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

from radixrt.errors import InvalidRequest, ModelError, RadixrtError
from radixrt.model.chat_template import ChatTemplate, checked_messages

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = """
{%- set loop_messages = messages %}
{%- if tools is defined and tools is not none %}{{- 'Tools: ' ~ (tools | tojson(indent=4)) ~ '\\n' }}{% endif %}
{%- for message in loop_messages %}
    {%- set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' %}
    {%- if loop.index0 == 0 %}
        {%- set content = bos_token + content %}
    {%- endif %}
    {{- content }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
INST = """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user/assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1, count=0) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" and message.content is string and not message.content.startswith('<r>') %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
FEATURES = """
{% macro shout(text, times=2) %}{{ (text | upper) * times }}{% if caller %}{{ caller() }}{% endif %}{% endmacro %}
{% call shout('hey') %} called{% endcall %}

{%- set captured %}{% for m in messages if m.role != 'system' %}{{ loop.index }}/{{ loop.length }}:{{ loop.cycle('a', 'b') }};{% else %}none{% endfor %}{% endset %}
{{ captured | length }} {{ captured }}
{% generation %}{{ messages | map(attribute='role') | join(', ') }}{% endgeneration %}
{% for i in range(10) %}{% if i == 3 %}{% continue %}{% elif i > 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{{ [3, 1, 2] | sort | list }} {{ {'b': 1, 'a': [true, none, 1.5, "é<>&'"]} | tojson }} {{ {'b': 1, 'a': 2} | dictsort }}
{{ "%s has %5.2f%%" % ('x', 3.14159) }} {{ '{:>6}|{a!r}'.format('y', a=1) }} {{ 'x' ~ 1 ~ none ~ [1, 'b'] }} {{ -7 // 2 }} {{ 2 ** 10 }}
{{ messages[0].content.replace('a', 'o').split(' ')[:2] }} {{ messages[0].content | replace('a', 'o') | title | trim | indent(2) }}
{{ messages[-1]['content'][::-1] }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ undefined_thing }}
{{ (1, 2) + (3,) }} {{ dict(a=1, b=[]) }} {{ [1, 2, 3] | sum }} {{ messages | map(attribute='content') | map('length') | sum }}
{{ 'a,b'.split(',') | reverse | join('-') }} {{ [[1, 2], [3]] | sum(start=[]) }} {{ 3.7 | round | int }} {{ range(7) | batch(3, 0) | list }}
{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}{{ ns.seen | unique | list }}
{{ '<b>' | e }} {{ 'x' | center(5) }}. {{ 'abc' | first }}{{ 'abc' | last }} {{ '' | default('empty', true) }} {{ none is none }} {{ 'a' in 'cat' }}
{% filter upper %}filtered {{ messages[0].role }}{% endfilter %} {{ 1 if false }} {{ not true }} {{ 'A' | lower ~ 'b' }} {{ [1, 2] == [1, 2] }}
"""

USER = {"role": "user", "content": "What is a cat?"}
SYSTEM = {"role": "system", "content": " You are a cat.  "}
REPLY = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nMeow é 日本 <&>"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "look", "arguments": {"at": "é<b>", "n": [1, 2.5, None, True]}}}
    ],
}
RESULT = {"role": "tool", "content": '{"seen": true}'}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Löök at <it> & that",
        "parameters": {"type": "object", "properties": {}},
    },
}
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "tools": TOOLS, "features": FEATURES}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, REPLY, USER],
    "ends with assistant": [USER, REPLY],
    "tools": [SYSTEM, USER, CALL, RESULT, RESULT, REPLY, USER],
}
KWARGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "prompt": {"add_generation_prompt": True},
    "tools": {"add_generation_prompt": True, "tools": [FUNCTION, FUNCTION]},
    "thinking": {"add_generation_prompt": True, "enable_thinking": False},
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("kwargs", KWARGS)
def test_renders_as_transformers(template: str, chat: str, kwargs: str) -> None:
    options = {"add_generation_prompt": False, **KWARGS[kwargs]}
    ours = ChatTemplate(TEMPLATES[template])
    try:
        (expected,), _ = render_jinja_template(
            conversations=[_normalize_chat_messages(CHATS[chat])],
            chat_template=TEMPLATES[template],
            **options,
            **TOKENS,
        )
    except Exception as error:
        with pytest.raises(RadixrtError) as ours_error:
            ours.render(CHATS[chat], **options, **TOKENS)
        assert isinstance(ours_error.value, InvalidRequest) == ("alternate" in str(error))
        return
    assert expected
    assert ours.render(CHATS[chat], **options, **TOKENS) == expected


def test_most_of_the_table_renders() -> None:
    rendered = 0
    for template in TEMPLATES.values():
        for chat in CHATS.values():
            try:
                rendered += bool(ChatTemplate(template).render(chat, **TOKENS))
            except RadixrtError:
                continue
    assert rendered >= 20


@given(st.lists(st.fixed_dictionaries({"role": st.text(min_size=1), "content": st.text()}), min_size=1, max_size=4))
def test_any_text_renders_as_transformers(messages: list[dict[str, str]]) -> None:
    (expected,), _ = render_jinja_template(conversations=[messages], chat_template=TOOLS, add_generation_prompt=True)
    assert TEMPLATE.render(messages) == expected


TEMPLATE = ChatTemplate(TOOLS)


def test_strftime_now() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER]) in {str(datetime.now().year + i) for i in (0, -1)}


# -- templates that mean harm: (source, what the error says)

DOUBLE = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
TIME, VALUE, TOTAL, OUTPUT = "takes longer than", "makes a value of", "altogether", "writes more than"
HARMFUL = {
    "long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "nested ranges": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "plain loops": (
        "{% set r = range(99999) %}{% set x %}{% for i in r %}{% for j in r %}{% for k in r %}{% endfor %}"
        + "{% endfor %}{% endfor %}{% endset %}",
        TIME,
    ),
    "loop filters": ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", TIME),
    "lazy filters": ("{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}", TIME),
    "macro recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself"),
    "macro tree": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}", TIME),
    "block recursion": ("{% block a %}{{ self.a() }}{% endblock %}", "calls itself"),
    "loop recursion": ("{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}", "calls itself"),
    "endless output": ("{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}", OUTPUT),
    "endless capture": ("{% set x %}{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}{% endset %}", VALUE),
    "many values": ("{% for i in range(99999) %}{% set x = 'a' * 1000000 %}{% endfor %}", TOTAL),
    "many slices": ("{% set x = 'a' * 8000000 %}{% for i in range(9999) %}{% set y = x[1:] %}{% endfor %}", TOTAL),
    "many lazy values": ("{{ range(99999) | map('center', 1000000) | list | length }}", TOTAL),
    "repeated string": ("{{ 'a' * 10**9 }}", VALUE),
    "repeated list": ("{{ [messages] * 10**8 }}", VALUE),
    "repeated from the left": ("{{ 10**9 * 'a' }}", VALUE),
    "doubled by ~": (DOUBLE.replace("STEP", "ns.x ~ ns.x"), VALUE),
    "doubled by +": (DOUBLE.replace("STEP", "ns.x + ns.x"), VALUE),
    "doubled list": (DOUBLE.replace("'aa'", "[1]").replace("STEP", "ns.x + ns.x"), VALUE),
    "doubled by list": (DOUBLE.replace("STEP", "[ns.x, ns.x]"), VALUE),
    "doubled by tuple": (DOUBLE.replace("STEP", "(ns.x, ns.x)"), VALUE),
    "doubled by dict": (DOUBLE.replace("STEP", "{'a': ns.x, 'b': ns.x}"), VALUE),
    "doubled by dict()": (DOUBLE.replace("STEP", "dict(a=ns.x, b=ns.x)"), VALUE),
    "nested lists": (DOUBLE.replace("STEP", "[ns.x]"), "64 deep"),
    "nested tuples": (DOUBLE.replace("STEP", "(ns.x,)"), "64 deep"),
    "nested dicts": (DOUBLE.replace("STEP", "{'a': ns.x}"), "64 deep"),
    "nested by list": (DOUBLE.replace("STEP", "[ns.x] | list"), "64 deep"),
    "nested by batch": (DOUBLE.replace("'aa'", "[1]").replace("STEP", "ns.x | batch(2) | list"), "64 deep"),
    "doubled by capture": (
        DOUBLE.replace("{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        VALUE,
    ),
    "doubled by replace": (DOUBLE.replace("STEP", "ns.x.replace('a', 'aa')"), VALUE),
    "doubled by replace of nothing": (DOUBLE.replace("STEP", "ns.x.replace('', 'aa')"), VALUE),
    "squared by replace": (DOUBLE.replace("STEP", "ns.x | replace('a', ns.x)"), VALUE),
    "squared by join": (DOUBLE.replace("STEP", "[1, 2, 3] | join(ns.x)"), VALUE),
    "squared by str.join": (DOUBLE.replace("STEP", "ns.x.join([ns.x, ns.x])"), VALUE),
    "doubled by %": (DOUBLE.replace("STEP", "'%s%s' % (ns.x, ns.x)"), VALUE),
    "doubled by named %": (DOUBLE.replace("STEP", "'%(a)s%(a)s' % {'a': ns.x}"), VALUE),
    "doubled by format": (DOUBLE.replace("STEP", "'{0}{0}'.format(ns.x)"), VALUE),
    "doubled by format_map": (DOUBLE.replace("STEP", "'{a}{a}'.format_map({'a': ns.x})"), VALUE),
    "doubled by the format filter": (DOUBLE.replace("STEP", "'%s%s' | format(ns.x, ns.x)"), VALUE),
    "doubled by sum": (DOUBLE.replace("'aa'", "[1]").replace("STEP", "[ns.x, ns.x] | sum(start=[])"), VALUE),
    "doubled by indent": (DOUBLE.replace("STEP", "('a\n' ~ ns.x) | indent(ns.x)"), VALUE),
    "joined lazily": ("{{ ('a' * 8000000).join(range(9999) | map('string')) }}", VALUE),
    "joined lazily by the filter": ("{{ range(9999) | map('string') | join('a' * 8000000) }}", VALUE),
    "views": ("{{ [{'a': 'x' * 1000000}.items()] * 1000 }}", VALUE),
    "listed views": (
        "{{ [{'a': 'x' * 8000000}.values()] | map('list') | list + [{'a': 'x' * 9000000}.keys()] * 9999 }}",
        VALUE,
    ),
    "nested by views": (
        "{% set ns = namespace(x=1) %}{% for i in range(99) %}{% for t in {'a': ns.x}.items() %}"
        + "{% set ns.x = t %}{% endfor %}{% endfor %}{{ {ns.x: 1} }}",
        "64 deep",
    ),
    "center": ("{{ 'a' | center(1000000000) }}", VALUE),
    "center by name": ("{{ 'a' | center(width=1000000000) }}", VALUE),
    "str.center": ("{{ 'a'.center(1000000000) }}", VALUE),
    "str.ljust": ("{{ 'a'.ljust(1000000000) }}", VALUE),
    "str.zfill": ("{{ '1'.zfill(1000000000) }}", VALUE),
    "% width": ("{{ '%1000000000d' % 1 }}", "width"),
    "% precision": ("{{ '%.1000000000f' % 1 }}", "width"),
    "% width from values": ("{{ '%*d' % (1000000000, 1) }}", "width"),
    "format width": ("{{ '{:1000000000}'.format(1) }}", "width"),
    "format width from values": ("{{ '{:{}}'.format(1, 1000000000) }}", "width"),
    "indent": ("{{ 'a\nb' | indent(1000000000) }}", VALUE),
    "tojson indent": ("{{ {'a': 1} | tojson(indent=1000000000) }}", "indents"),
    "batch": ("{{ [1] | batch(1000000000, 'x') | list }}", "batch"),
    "slice": ("{{ [1] | slice(1000000000) | list }}", "slice"),
    "round": ("{{ 2.5 | round(1000000000, 'floor') }}", "round"),
    "power": ("{{ 9 ** (9 ** 9) }}", "bits"),
    "towers": ("{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}", "bits"),
    "to_bytes": ("{{ (1).to_bytes(1000000000, 'big') }}", "not available"),
    "search from the right": ("{{ ('a' * 8000000).rfind('b' + 'a' * 4000000) }}", "compares"),
    "strip by many": ("{{ ('a' * 8000000).strip('b' * 8000000) }}", "compares"),
    "trim by many": ("{{ ('a' * 8000000) | trim('b' * 8000000) }}", "compares"),
    "strftime width": ("{{ strftime_now('%1000000000d') }}", "plain format"),
    "class": ("{{ ''.__class__ }}", "'__class__' of a str"),
    "class by item": ("{{ ''['__class__'] }}", "'__class__' of a str"),
    "class by attr": ("{{ '' | attr('__class__') }}", "attr"),
    "class by map": ("{{ [''] | map(attribute='__class__') | list }}", "'__class__' of a str"),
    "class by format": ("{{ '{0.__class__}'.format('') }}", "'__class__' of a str"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "'__init__'"),
    "globals of ours": ("{{ strftime_now.__globals__ }}", "'__globals__'"),
    "underscored": ("{{ namespace(a=1)._Namespace__attrs }}", ""),
    "change the messages": ("{{ messages.append(1) }}", "append"),
    "change a message": ("{{ messages[0].update(role='x') }}", "update"),
    "include": ("{% include '/etc/passwd' %}", "loader"),
    "lipsum": ("{{ lipsum(1000) }}", "lipsum"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_harmful_templates_are_stopped(case: str) -> None:
    source, expected = HARMFUL[case]
    before = threading.active_count()
    with pytest.raises(ModelError) as error:
        # a slow machine must not turn a limit on size into one on time
        ChatTemplate(source, name="the model", time_limit=0.5 if "takes longer" in expected else 60.0).render([USER])
    assert expected in str(error.value)
    assert str(error.value).startswith("the model: chat template ")
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'a' if }}", "line 1"),
        ("a\n{% for %}", "line 2"),
        ("{{ [1] | nofilter }}", "nofilter"),
        ("{% if %}", "line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{{ " + "9" * 5000 + " }}", "cannot be compiled"),
        ("x" * (2**20 + 1), "characters"),
        ("{{ messages.nothing.more }}", "failed"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
    ],
)
def test_broken_templates_say_where(source: str, expected: str) -> None:
    with pytest.raises(ModelError) as error:
        ChatTemplate(source).render([USER])
    assert expected in str(error.value)


def test_a_template_works_again_after_it_failed() -> None:
    template = ChatTemplate("{% for i in range(times) %}{{ 'x' * size }}{% endfor %}", max_output=1000)
    for times, size in ((1, 10**6), (10**5 - 1, 1)):
        with pytest.raises(ModelError):
            template.render([USER], times=times, size=size)
        assert template.render([USER], times=2, size=2) == "xxxx"


def test_long_chats_are_no_harm() -> None:
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(2000)]
    (expected,), _ = render_jinja_template(conversations=[chat], chat_template=TOOLS)
    assert ChatTemplate(TOOLS).render(chat, add_generation_prompt=False) == expected


# -- chats


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        (3, "messages"),
        (None, "messages"),
        ([], "messages"),
        ([USER] * 70000, "messages"),
        (["hello"], "messages[0]"),
        ([USER, None], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 3, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([USER, {"role": "user", "content": 3}], "messages[1].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", 3: 4}], "messages[0]"),
        ([{"role": "user", "content": "x", "name": object()}], "messages[0].name"),
        ([{"role": "user", "content": "x", "extra": [{"a": {1, 2}}]}], "messages[0].extra[0].a"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "messages[0].extra"),
    ],
)
def test_malformed_chats_name_the_field(messages: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        TEMPLATE.render(messages)
    assert error.value.field == field


def test_kwargs_are_checked_too() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = [deep]
    for name, value in (("tools", object()), ("documents", deep), ("n", 2**2000)):
        with pytest.raises(InvalidRequest) as error:
            TEMPLATE.render([USER], **{name: value})
        assert error.value.field.startswith(name)


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]
    assert checked_messages(({"role": "user", "content": [], "name": None},)) == [{"role": "user", "content": ""}]


def test_refusals_of_the_template_are_the_callers_errors() -> None:
    with pytest.raises(InvalidRequest, match="messages: refused by the chat template: roles must alternate") as error:
        ChatTemplate(INST).render([USER, USER], **TOKENS)
    assert error.value.field == "messages"


def test_the_template_cannot_reach_the_callers_objects() -> None:
    chat = [{"role": "user", "content": "x", "extra": {"a": [1]}}]
    assert ChatTemplate("{{ messages[0].extra.a.count(1) }}").render(chat) == "1"
    assert checked_messages(chat)[0]["extra"] is not chat[0]["extra"]
