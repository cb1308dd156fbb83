"""Chats with calls in them, from OpenAI's form to what the template of a model expects.

Invariants: a call's arguments are an object where the template writes JSON of them, and the text the model wrote where we or the template
write text; every tool result answers a call of an earlier message. A template that knows no tools gets them as words: in the system
message, the calls as the text they were, the results as what the user says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.tools.choose import knows_tools
from radixrt.tools.definitions import NAME, Tool, call_id
from radixrt.tools.formats import JSON, MISTRAL, ToolFormat

# A template that joins the arguments to text wants them as text: "..." + tool['function']['arguments'] + "..."
_AS_TEXT = re.compile(r"[+~]\s*[\w.\[\]'\"]*\barguments['\"]?\]?\s*(?:[+~]|-?\}\})")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INTRODUCTION = """\
You can call functions. They are described by JSON Schemas, one to a line, within <tools></tools>:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>
The result comes within <tool_response></tool_response>. Then go on, or answer."""


@dataclass(slots=True)
class _Chat:
    """What is known so far: calls that wait for their results, and those that have one, by the id that the client gave."""

    waiting: dict[str, tuple[str, str]] = field(default_factory=dict)  # id -> (id of the template, name)
    answered: set[str] = field(default_factory=set)
    calls: int = 0


def template_chat(
    field: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    format: ToolFormat | None,
    template: str | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for ``Tokenizer.render_chat(messages, **variables)``.

    Args:
        field: what the request calls the messages. messages: ``role`` and ``content``; of an assistant also ``tool_calls`` (arguments as
            text or object) and ``reasoning_content`` (or ``reasoning``); of a tool ``tool_call_id``, or the next call's.
        format: the model's; ``None`` and formats that are ``described`` put the tools into the system message.

    Raises:
        InvalidRequest: names ``messages[i]...``.
    """
    native = knows_tools(template) and not (format is not None and format.described)
    chat = _Chat()
    made: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        place = f"{field}[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequest(place, f"={shown(message)}: must be an object with role and content")
        role = message.get("role")
        if role == "assistant":
            one = _assistant(place, message, chat, format)
        elif role == "tool":
            one = _result(place, message, chat)
        else:
            for name in ("tool_calls", "tool_call_id"):
                if message.get(name):
                    raise InvalidRequest(f"{place}.{name}", f"has no meaning in a message of role {shown(role)}")
            one = dict(message)
        made.append(one)
    if native:
        as_text = template is not None and _AS_TEXT.search(template) is not None
        for one in made:
            for call in one.get("tool_calls", ()):
                function = call["function"]
                text = function.pop("text")
                function["arguments"] = text if as_text else function["arguments"]
        return made, {"tools": [tool.to_openai() for tool in tools]} if tools else {}
    return _in_words(made, tools, format or JSON), {}


def _assistant(place: str, message: Mapping[str, Any], chat: _Chat, format: ToolFormat | None) -> dict[str, Any]:
    one = {key: value for key, value in message.items() if key not in ("tool_calls", "reasoning", "reasoning_content")}
    for name in ("reasoning_content", "reasoning"):
        thought = message.get(name)
        if thought is None:
            continue
        if not isinstance(thought, str):
            raise InvalidRequest(f"{place}.{name}", f"={shown(thought)}: must be a string")
        if thought:
            one.setdefault("reasoning_content", thought)
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return one
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise InvalidRequest(f"{place}.tool_calls", f"={shown(calls)}: must be a list of calls")
    if one.get("content") is None:
        one["content"] = ""
    chat.waiting = {}
    one["tool_calls"] = [_call(f"{place}.tool_calls[{i}]", call, chat, format) for i, call in enumerate(calls)]
    return one


def _call(place: str, call: Any, chat: _Chat, format: ToolFormat | None) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidRequest(place, f"={shown(call)}: must be an object with id and function")
    if call.get("type", "function") != "function":
        raise InvalidRequest(f"{place}.type", f"={shown(call['type'])}: only 'function' is supported")
    function = call.get("function")
    if not isinstance(function, Mapping):
        problem = "is missing" if function is None else f"={shown(function)}"
        raise InvalidRequest(f"{place}.function", f"{problem}: must be an object with name and arguments")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.function.name", f"={shown(name)}: must be a tool's name")
    text, value = _arguments(f"{place}.function.arguments", function.get("arguments"))
    id = call.get("id")
    if id is None or id == "":
        id = call_id("", chat.calls)
    if not isinstance(id, str):
        raise InvalidRequest(f"{place}.id", f"={shown(id)}: must be a string")
    if id in chat.waiting:
        raise InvalidRequest(f"{place}.id", f"={shown(id)}: another call of this message has the same id")
    chat.calls += 1
    own = id
    if format is not None and format.id_style == MISTRAL.id_style and not _SHORT_ID.fullmatch(id):
        own = call_id(id, 0, MISTRAL.id_style)
    chat.waiting[id] = (own, name)
    return {"id": own, "type": "function", "function": {"name": name, "arguments": value, "text": text}}


def _arguments(place: str, given: Any) -> tuple[str, dict[str, Any]]:
    """The arguments as text and as an object."""
    if given is None or given == "":
        return "{}", {}
    if isinstance(given, Mapping):
        value = dict(given)
        return json.dumps(value, ensure_ascii=False), value
    try:
        read = json.loads(given) if isinstance(given, str) else None
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise InvalidRequest(place, f"={shown(given)}: must be the JSON text of an object")
    return given, read


def _result(place: str, message: Mapping[str, Any], chat: _Chat) -> dict[str, Any]:
    """A tool's result, with the id and the name of its call."""
    given = message.get("tool_call_id")
    if given is None and chat.waiting:  # Ollama's clients give none: the results stand in the order of the calls
        given = next((id for id in chat.waiting if id not in chat.answered), next(iter(chat.waiting)))
    if not isinstance(given, str) or given not in chat.waiting:
        problem = "is missing" if given is None else f"={shown(given)}"
        hint = nearest(given, chat.waiting) if isinstance(given, str) and chat.waiting else ""
        raise InvalidRequest(
            f"{place}.tool_call_id", f"{problem}: no call of the assistant's message before it has this id{hint}"
        )
    chat.answered.add(given)
    own, name = chat.waiting[given]
    if message.get("content") is None:
        raise InvalidRequest(f"{place}.content", "is missing")
    return {**message, "name": message.get("name") or name, "tool_call_id": own}


def _in_words(messages: list[dict[str, Any]], tools: Sequence[Tool], format: ToolFormat) -> list[dict[str, Any]]:
    """The chat for a template that knows neither tools nor calls."""
    made: list[dict[str, Any]] = []
    results: list[str] = []

    def say() -> None:
        if results:
            made.append({"role": "user", "content": "\n".join(results)})
            results.clear()

    for one in messages:
        if one.get("role") == "tool":
            results.append(f"<tool_response>\n{_plain(one['content'])}\n</tool_response>")
            continue
        say()
        if "tool_calls" in one:
            one = {key: value for key, value in one.items() if key != "tool_calls"} | {
                "content": _written(_plain(one["content"]), one["tool_calls"], format)
            }
        made.append(one)
    say()
    if not tools:
        return made
    lines = "\n".join(json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    if made and made[0].get("role") == "system":
        first = made[0]
        return [{**first, "content": f"{_plain(first['content'])}\n\n{introduction}"}, *made[1:]]
    return [{"role": "system", "content": introduction}, *made]


def _written(content: str, calls: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    """Content and calls as the model wrote them."""
    texts = [
        format.head + call["function"]["name"] + format.middle + call["function"]["text"] + format.tail
        for call in calls
    ]
    if format.kind == "python":  # its arguments are no JSON: written as keyword arguments they would be others
        return _written(content, calls, JSON)
    return (content + "\n" if content else "") + format.open + format.separator.join(texts) + format.close


def _plain(content: Any) -> str:
    """The text of a content that may be a list of text parts (which the template's room checks)."""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "\n".join(part.get("text", "") if isinstance(part, Mapping) else str(part) for part in content)
    return ""
