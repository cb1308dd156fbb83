"""Reads the bodies of ``/v1/responses``: input items become the messages of a ``ChatAsk``; what chats have too is read by their reader.

Invariants: a field is honoured, refused, or one of ``IGNORED``; null is the same as left out; an error names the field as this body has it
(``input[2].call_id``), also one of the turn that runs (``own_name``). Every call has its output, every output its call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixrt.checks import flag, integer
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.server.chat import ChatAsk
from radixrt.server.dialects import object_of
from radixrt.server.errors import UnknownField
from radixrt.server.openai_requests import CHAT, EFFORTS, Rules, read_chat
from radixrt.tools import Tool, read_choice, read_tools
from radixrt.tools.definitions import NAME

Item = Mapping[str, Any]
Find = Callable[[str], Item | None]

# What chats call otherwise, or have no use for here.
_CHATS_OWN = frozenset(
    "messages max_tokens max_completion_tokens logprobs echo n stream_options response_format tools tool_choice top_logprobs "
    "reasoning_effort add_generation_prompt continue_final_message separate_reasoning metadata store".split()
)
_ALIKE = tuple(name for name in CHAT if name not in _CHATS_OWN)
RESPONSE = (
    "input",
    "instructions",
    "previous_response_id",
    "tools",
    "tool_choice",
    "text",
    "reasoning",
    "max_output_tokens",
    "top_logprobs",
    "include",
    "stream_options",
    "store",
    "metadata",
    "truncation",
    "background",
    *_ALIKE,
)
# What this server does not have, and the values that ask for nothing.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "max_tool_calls": (),
    "access_programs": (),
    "background_options": (),
    "image": (),
}
# How the reader of chats calls what the body calls otherwise; the longest first.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("reasoning_effort", "reasoning.effort"),
    ("messages", "input"),
)
_CHATS = dict(_NAMES)
LOGPROBS = "message.output_text.logprobs"
_INCLUDE = (LOGPROBS, "reasoning.encrypted_content")  # the thinking is in its item, for all to read
_ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}
_FIELDS: dict[str, tuple[str, ...]] = {
    "message": ("type", "role", "content", "id", "status", "phase"),
    "function_call": ("type", "call_id", "name", "arguments", "id", "status", "parsed_arguments"),
    "function_call_output": ("type", "call_id", "output", "id", "status"),
    "reasoning": ("type", "summary", "content", "id", "status"),
    "item_reference": ("type", "id"),
}
_PART = ("type", "text", "annotations", "logprobs", "parsed", "refusal", "prompt_cache_breakpoint")
_TEXTS = ("input_text", "output_text", "refusal")
_MESSAGE_INDEX = re.compile(r"input\[(\d+)\](.*)", re.DOTALL)
_MAX_ID = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A response that is asked for.

    Fields:
        items: of this input, whole, with their ids. origins: where each of the ask's messages is in the body.
        head: what the response says again of what was asked. logprobs: they are wanted.
    """

    ask: ChatAsk
    items: tuple[Item, ...]
    origins: tuple[str, ...]
    head: Mapping[str, Any]
    store: bool = True
    logprobs: bool = False
    warnings: tuple[str, ...] = ()


def read_response(
    body: Mapping[str, Any], rules: Rules, key: str, earlier: Sequence[Item] = (), find: Find | None = None
) -> Turn:
    """The turn of a body.

    Args:
        key: what the ids of the input's items are made from. earlier: the items of the previous response and of those before it.
        find: an item that was kept, by its id.

    Raises:
        InvalidRequest, RequestFailed: names the field and its value, and says what would be right.
    """
    body, warnings = _known(body, rules)
    items = _items(body.get("input"), key, rules.warn, find)
    messages, origins = _messages(
        [("previous_response_id", item) for item in earlier]
        + [("input" if isinstance(body["input"], str) else f"input[{i}]", item) for i, item in enumerate(items)]
    )
    instructions = body.get("instructions")
    if instructions is not None:
        _instructed(_text("instructions", instructions), messages, origins)
    if not messages:
        raise InvalidRequest("input", "=[]: must hold at least one item")
    tools = read_tools("tools", body.get("tools"), "responses")
    allowed, choice = _choice(body.get("tool_choice"), tools)
    text, format = _format(body.get("text"))
    reasoning = _reasoning(body.get("reasoning"))
    logprobs, top = _logprobs(body)
    chat: dict[str, Any] = {name: body[name] for name in _ALIKE if name in body}
    chat["messages"] = [{"role": "user", "content": "-"}]  # ours take its place
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if reasoning["effort"] is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    if format is not None:
        chat["response_format"] = format
    if logprobs:
        chat |= {"logprobs": True, "top_logprobs": top}
    if "stream_options" in body:
        if not body.get("stream"):
            raise InvalidRequest("stream_options", f"={shown(body['stream_options'])}: needs stream=true")
        for name, value in object_of("stream_options", body["stream_options"], ("include_obfuscation",)).items():
            flag(f"stream_options.{name}", value)
    try:
        ask = read_chat(chat, rules).ask
    except InvalidRequest as error:
        raise own_name(error) from None
    assert ask is not None
    names = {**ask.names, "prompt": "input", "max_tokens": "max_output_tokens"}
    if allowed and choice.kind != "none":
        names.setdefault("constraint", "tools")
    if "constraint" in names:
        names["constraint"] = _renamed(names["constraint"])
    ask = replace(ask, messages=tuple(messages), tools=allowed, choice=choice, names=names)
    store = flag("store", body.get("store", True))
    head = _head(body, ask, tools, text, reasoning, store, top)
    return Turn(ask, items, tuple(origins), head, store, logprobs, warnings)


def own_name(error: InvalidRequest, origins: Sequence[str] = ()) -> InvalidRequest:
    """An error of the chats' room, with the body's name of the field; ``origins``: of the messages."""
    field = _renamed(error.field)
    rest = str(error)[len(error.field) :].removeprefix(": ")
    found = _MESSAGE_INDEX.fullmatch(field)
    if found is not None and int(found[1]) < len(origins):
        field = origins[int(found[1])] + found[2].replace("tool_call_id", "call_id")
    if field == error.field:
        return error
    for chats, own in _NAMES[:2]:  # two constraints at once are both named
        rest = rest.replace(f" and {chats}", f" and {own}")
    return type(error)(field, rest)


def _renamed(field: str) -> str:
    for chats, own in _NAMES:
        if field == chats or field.startswith((chats + ".", chats + "[")):
            return own + field[len(chats) :]
    return field


# ---- fields


def _known(body: Mapping[str, Any], rules: Rules) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a body that are not null; refuses, or warns about, those that nobody knows."""
    known: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        if name in _ABSENT:
            if value is not None and value not in _ABSENT[name]:
                raise InvalidRequest(name, f"={shown(value)}: is not supported here; leave it out")
        elif name not in RESPONSE:
            short = name if len(name) <= 80 else name[:77] + "..."
            hint = f"; here it is {_CHATS[name]}" if name in _CHATS else nearest(name, RESPONSE)
            problem = f"responses has no such field{hint}"
            if not rules.warn:
                raise UnknownField(short, problem)
            warnings.append(f"{short} was ignored: {problem}")
        elif value is not None:
            known[name] = value
    if known.get("background", False) is not False:
        raise InvalidRequest(
            "background", f"={shown(known['background'])}: must be false; ask with stream=true instead"
        )
    if known.get("truncation", "disabled") != "disabled":
        problem = f"={shown(known['truncation'])}: must be disabled; nothing is dropped from an input that is too long"
        raise InvalidRequest("truncation", problem)
    if "metadata" in known:
        _check_metadata(known["metadata"])
    return known, tuple(warnings[:16])


def _check_metadata(value: Any) -> None:
    if not isinstance(value, dict) or len(value) > 16:
        raise InvalidRequest("metadata", f"={shown(value)}: must be an object of at most 16 texts")
    for name, text in value.items():
        if len(name) > 64:
            raise InvalidRequest("metadata", f" has the key {shown(name)}: must have at most 64 characters")
        if not isinstance(text, str) or len(text) > 512:
            raise InvalidRequest(f"metadata.{name}", f"={shown(text)}: must be a string of at most 512 characters")


def _choice(value: Any, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], Any]:
    """The tools that are offered, and which of them must be called."""
    if not isinstance(value, Mapping) or value.get("type") != "allowed_tools":
        return tools, read_choice(value, tools)
    given = object_of("tool_choice", value, ("type", "mode", "tools"))
    if given.get("mode") not in ("auto", "required"):
        raise InvalidRequest("tool_choice.mode", f"={shown(given.get('mode'))}: must be auto or required")
    named = given.get("tools")
    if not isinstance(named, list) or not named:
        raise InvalidRequest("tool_choice.tools", f"={shown(named)}: must be a list of at least one tool")
    names = {read_choice(item, tools, f"tool_choice.tools[{i}]").name for i, item in enumerate(named)}
    if None in names:
        raise InvalidRequest("tool_choice.tools", f"={shown(named)}: must hold objects of type function with a name")
    allowed = tuple(tool for tool in tools if tool.name in names)
    return allowed, read_choice(given["mode"], allowed)


def _format(value: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``text`` as the response says it again, and the ``response_format`` of chats that it is."""
    given = {} if value is None else object_of("text", value, ("format", "verbosity"))
    if given.get("verbosity", "medium") != "medium":
        raise InvalidRequest("text.verbosity", f"={shown(given['verbosity'])}: is not supported; must be medium")
    format = given.get("format", {"type": "text"})
    if not isinstance(format, Mapping):
        raise InvalidRequest("text.format", f"={shown(format)}: must be an object")
    if format.get("type") != "json_schema":
        return {"format": format, "verbosity": "medium"}, dict(format)
    schema = {name: item for name, item in format.items() if name != "type"}
    if not isinstance(schema.get("schema", {}), Mapping):
        raise InvalidRequest("text.format.schema", f"={shown(schema['schema'])}: must be a JSON Schema: an object")
    return {"format": format, "verbosity": "medium"}, {"type": "json_schema", "json_schema": schema}


def _reasoning(value: Any) -> dict[str, Any]:
    given = (
        {}
        if value is None
        else object_of("reasoning", value, ("effort", "summary", "generate_summary", "context", "mode"))
    )
    effort = given.get("effort")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise InvalidRequest("reasoning.effort", f"={shown(effort)}: must be one of {', '.join(EFFORTS)}")
    for name, only in (("summary", "auto"), ("generate_summary", "auto"), ("context", "auto"), ("mode", "standard")):
        if given.get(name, only) != only:  # the whole thinking is in the response
            raise InvalidRequest(f"reasoning.{name}", f"={shown(given[name])}: is not supported; must be {only}")
    return {"effort": effort, "summary": None}


def _logprobs(body: Mapping[str, Any]) -> tuple[bool, int]:
    include, top = body.get("include", []), integer("top_logprobs", body.get("top_logprobs", 0), 0, 2**31 - 1)
    if not isinstance(include, list):
        raise InvalidRequest("include", f"={shown(include)}: must be a list")
    for i, name in enumerate(include):
        if name not in _INCLUDE:
            hint = nearest(name, _INCLUDE) if isinstance(name, str) else "; must be a string"
            raise InvalidRequest(f"include[{i}]", f"={shown(name)}: is not supported{hint}")
    return LOGPROBS in include or top > 0, top


def _head(
    body: Mapping[str, Any],
    ask: ChatAsk,
    tools: Sequence[Tool],
    text: Mapping[str, Any],
    reasoning: Mapping[str, Any],
    store: bool,
    top: int,
) -> dict[str, Any]:
    told = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description or None,
            "parameters": dict(tool.parameters),
            "strict": tool.strict,
        }
        for tool in tools
    ]
    return {
        "background": False,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata", {}),
        "model": ask.model,
        "parallel_tool_calls": ask.parallel,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": reasoning,
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": "default",
        "store": store,
        "temperature": ask.params.temperature,
        "text": text,
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": told,
        "top_logprobs": top,
        "top_p": ask.params.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
    }


# ---- items


def _items(value: Any, key: str, warn: bool, find: Find | None) -> tuple[Item, ...]:
    """The items of an input, each with an id."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        problem = "is missing" if value is None else f"={shown(value)}"
        raise InvalidRequest("input", f"{problem}: must be a text or a list of items")
    return tuple(_item(f"input[{i}]", item, f"{key}i{i}", warn, find) for i, item in enumerate(value))


def _item(where: str, item: Any, key: str, warn: bool, find: Find | None) -> Item:
    if not isinstance(item, Mapping):
        raise InvalidRequest(where, f"={shown(item)}: must be an object")
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message" if "role" in item else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        problem = "is missing" if kind is None else f"={shown(kind)}"
        raise InvalidRequest(f"{where}.type", f"{problem}: must be one of {', '.join(_FIELDS)}")
    if kind == "reasoning" and "encrypted_content" in item and not item.get("content"):
        problem = "cannot be read here: send the reasoning item's content, or leave the item out"
        raise InvalidRequest(f"{where}.encrypted_content", problem)
    for name in item:
        if name not in _FIELDS[kind] and name != "encrypted_content" and not warn:
            problem = f"there is no such field{nearest(name, _FIELDS[kind])}"
            raise UnknownField(f"{where}.{shown(name).strip(chr(39))}", problem)
    id = item.get("id")
    if id is not None and (not isinstance(id, str) or not 1 <= len(id) <= _MAX_ID):
        raise InvalidRequest(f"{where}.id", f"={shown(id)}: must be a string of 1 to {_MAX_ID} characters")
    if kind == "item_reference":
        if id is None:
            raise InvalidRequest(f"{where}.id", "is missing")
        kept = find(id) if find is not None else None
        if kept is None:
            problem = f"={shown(id)}: there is no such item in a response that is kept; send the item itself"
            raise InvalidRequest(f"{where}.id", problem)
        return kept
    if kind == "message":
        return _message(where, item, key)
    if kind == "reasoning":
        return _thought(where, item, key)
    call_id = _text(f"{where}.call_id", item.get("call_id"))
    if not 1 <= len(call_id) <= _MAX_ID:
        raise InvalidRequest(f"{where}.call_id", f"={shown(call_id)}: must have 1 to {_MAX_ID} characters")
    made = {"id": id or f"fc_{key}", "type": kind, "call_id": call_id, "status": "completed"}
    if kind == "function_call_output":
        return {**made, "output": _output(f"{where}.output", item.get("output"))}
    name, arguments = item.get("name"), _text(f"{where}.arguments", item.get("arguments"))
    if not isinstance(name, str) or not NAME.fullmatch(name):
        problem = "is missing" if name is None else f"={shown(name)}"
        raise InvalidRequest(f"{where}.name", f"{problem}: must be a tool's name")
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise InvalidRequest(f"{where}.arguments", f"={shown(arguments)}: must be the JSON text of an object")
    return {**made, "name": name, "arguments": arguments}


def _message(where: str, item: Item, key: str) -> Item:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problem = "is missing" if role is None else f"={shown(role)}"
        hint = "; a tool's result is an item of type function_call_output" if role == "tool" else ""
        raise InvalidRequest(f"{where}.role", f"{problem}: must be one of {', '.join(_ROLES)}{hint}")
    texts = _parts(f"{where}.content", item.get("content"))
    content: list[dict[str, Any]]
    if role == "assistant":
        content = [{"type": "output_text", "text": text, "annotations": []} for text in texts]
    else:
        content = [{"type": "input_text", "text": text} for text in texts]
    return {
        "id": item.get("id") or f"msg_{key}",
        "type": "message",
        "role": role,
        "status": "completed",
        "content": content,
    }


def _thought(where: str, item: Item, key: str) -> Item:
    made: dict[str, Any] = {"id": item.get("id") or f"rs_{key}", "type": "reasoning", "status": "completed"}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(name, [])
        if not isinstance(parts, list):
            raise InvalidRequest(f"{where}.{name}", f"={shown(parts)}: must be a list of parts of type {kind}")
        made[name] = []
        for i, part in enumerate(parts):
            place = f"{where}.{name}[{i}]"
            if not isinstance(part, Mapping):
                raise InvalidRequest(place, f"={shown(part)}: must be an object")
            if part.get("type") != kind:
                raise InvalidRequest(f"{place}.type", f"={shown(part.get('type'))}: must be {kind}")
            made[name].append({"type": kind, "text": _text(f"{place}.text", part.get("text"))})
    return made


def _output(where: str, value: Any) -> str | list[dict[str, Any]]:
    """What a tool gave."""
    if isinstance(value, str):
        return value
    return [{"type": "input_text", "text": text} for text in _parts(where, value)]


def _parts(where: str, content: Any) -> list[str]:
    """The texts of a content."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        problem = "is missing" if content is None else f"={shown(content)}"
        raise InvalidRequest(where, f"{problem}: must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(part, Mapping):
            raise InvalidRequest(place, f"={shown(part)}: must be an object")
        kind = part.get("type")
        if kind not in _TEXTS:
            problem = f"={shown(kind)}: the model reads text only; parts must be of type input_text or output_text"
            raise InvalidRequest(f"{place}.type", problem)
        for name, item in part.items():
            if name not in _PART and item is not None:
                raise UnknownField(
                    f"{place}.{shown(name).strip(chr(39))}", f"there is no such field{nearest(name, _PART)}"
                )
        name = "refusal" if kind == "refusal" else "text"
        texts.append(_text(f"{place}.{name}", part.get(name)))
    return texts


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(where, f"{'is missing' if value is None else '=' + shown(value)}: must be a string")
    return value


# ---- from items to messages


def _messages(placed: Iterable[tuple[str, Item]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages of a chat, and where each begins: what the assistant thought, said and called in one go is one message.

    Raises:
        InvalidRequest: a call without its output, an output without its call.
    """
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    waiting: dict[str, str] = {}  # calls without their output
    going_on = False  # the last message is the assistant's, and what follows may belong to it

    def add(where: str, message: dict[str, Any]) -> None:
        messages.append(message)
        origins.append(where)

    for where, item in placed:
        kind = item["type"]
        if kind == "function_call_output":
            id = item["call_id"]
            if waiting.pop(id, None) is None:
                hint = nearest(id, waiting) if waiting else ""
                raise InvalidRequest(f"{where}.call_id", f"={shown(id)}: no call before it waits for an output{hint}")
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(part["text"] for part in output)
            add(where, {"role": "tool", "tool_call_id": id, "content": text})
            going_on = False
            continue
        if kind == "message" and item["role"] != "assistant":
            add(where, {"role": _ROLES[item["role"]], "content": _joined(item["content"])})
            going_on = False
            continue
        last = messages[-1] if going_on else {}
        if (
            not going_on
            or (kind == "reasoning" and (last["content"] or "tool_calls" in last))
            or (kind == "message" and last["content"] and "tool_calls" not in last)
        ):
            last = {"role": "assistant", "content": ""}
            add(where, last)
            going_on = True
        if kind == "reasoning":
            thought = _joined(item["content"] or item["summary"])
            last["reasoning_content"] = last.get("reasoning_content", "") + thought
        elif kind == "message":
            last["content"] += _joined(item["content"])
        else:
            id = item["call_id"]
            if id in waiting:
                raise InvalidRequest(f"{where}.call_id", f"={shown(id)}: {waiting[id]} has the same")
            waiting[id] = where
            function = {"name": item["name"], "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append({"id": id, "type": "function", "function": function})
    if waiting:
        id, where = next(iter(waiting.items()))
        problem = f"has no item of type function_call_output for the call {shown(id)} of {where}"
        raise InvalidRequest("input", problem)
    return messages, origins


def _joined(parts: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts)


def _instructed(text: str, messages: list[dict[str, Any]], origins: list[str]) -> None:
    """Put the instructions first: into the system message that is there, or before all messages."""
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = f"{text}\n\n{messages[0]['content']}"
    else:
        messages.insert(0, {"role": "system", "content": text})
        origins.insert(0, "instructions")
