"""Reads the bodies of Anthropic's Messages API: blocks in, a turn out, or one error that names the block.

Invariants: every block of a message is read, refused by its name, or (``redacted_thinking``, of which nobody here can read anything) left
out; every result answers a call of the assistant's message before.

    messages[i].content[j]   text, thinking, tool_use, tool_result  ->  messages of role user, assistant, tool
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixrt.checks import flag, integer, strings
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.constraint import Constraint
from radixrt.request import SamplingParams
from radixrt.server.chat import ChatAsk, ReasoningAsk
from radixrt.server.dialects import object_of, renamed
from radixrt.server.errors import Failure, RequestFailed
from radixrt.server.openai_requests import EFFORTS
from radixrt.server.turns import known, text, way
from radixrt.tools import ToolChoice, read_choice, read_tools
from radixrt.tools.definitions import NAME

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_ASKING = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
# Accepted for what they are, and without effect: who asks, how it is billed, hints for a cache that needs none.
IGNORED = ("metadata", "service_tier", "cache_control")
MESSAGES = (*_ASKING, "max_tokens", "stop_sequences", "stream", *_SAMPLING, "priority", "cache_salt", *IGNORED)
COUNT = (*_ASKING, *IGNORED)
# Fields of the API that mean what only its own service has, and the values that ask for nothing.
LATER: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
CHOICES = ("auto", "any", "tool", "none")
_USER = ("text", "tool_result")
_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
_BLOCKS: dict[str, tuple[str, ...]] = {
    "text": ("type", "text", "cache_control", "citations"),
    "thinking": ("type", "thinking", "signature"),
    "redacted_thinking": ("type", "data"),
    "tool_use": ("type", "id", "name", "input", "cache_control", "caller"),
    "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control"),
}
_SEEN = ("image", "document", "container_upload")  # blocks of what the model does not read


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read. ``thinking``: its text is shown."""

    ask: ChatAsk
    thinking: bool
    warnings: Sequence[str] = ()


def read_messages(
    body: Mapping[str, Any],
    valid: Sequence[str],
    models: Sequence[str],
    template: Mapping[str, Any],
    *,
    warn: bool = False,
) -> Asked:
    """The turn that a body asks for.

    Args:
        valid: ``MESSAGES`` or ``COUNT``. template: defaults of what the chat template is given.

    Raises:
        InvalidRequest, RequestFailed: names the field and its value, and says what would be right.
    """
    body, warnings = known("messages", body, valid, LATER, warn)
    counts = "max_tokens" not in valid
    model = text("model", body.get("model"))
    if model not in models:
        problem = f"model={shown(model)}: is not served here{nearest(model, models)}"
        raise RequestFailed(Failure(404, problem, "model", "model_not_found"))
    for name, kind, what in (("metadata", dict, "an object"), ("service_tier", str, "a string"), ("cache_control", dict, "an object")):  # fmt: skip
        if not isinstance(body.get(name, kind()), kind):
            raise InvalidRequest(name, f"={shown(body[name])}: must be {what}")
    messages = _chat(body.get("messages"), body.get("system"))
    continues = messages[-1]["role"] == "assistant"
    tools = read_tools("tools", body.get("tools"), form="anthropic")
    choice, parallel = _choice(body.get("tool_choice"), tools)
    names = {"prompt": "messages", "stop": "stop_sequences"}
    kwargs = dict(template)
    most = None if counts else integer("max_tokens", body.get("max_tokens"), 1, 2**63 - 1)
    constraint, effort = _output(body.get("output_config"))
    if constraint is not None:
        names["constraint"] = "output_config.format.schema"
    elif tools and choice.kind != "none":
        names["constraint"] = "tools"
    reasoning, shows = _thinking(body.get("thinking"), most, effort)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
    values = {name: body[name] for name in _SAMPLING if name in body}
    if "stop_sequences" in body:
        values["stop"] = strings("stop_sequences", body["stop_sequences"])
    try:
        params = SamplingParams(**values, max_tokens=most, constraint=constraint)
    except InvalidRequest as error:
        raise renamed(error, names) from None
    ask = ChatAsk(
        messages=messages,
        params=params,
        tools=tools,
        choice=choice,
        parallel=parallel,
        reasoning=reasoning,
        template=kwargs,
        generation_prompt=not continues,
        continues=continues,
        stream=flag("stream", body.get("stream", False)),
        model=model,
        names=names,
        **way(body),
    )
    return Asked(ask, shows, warnings)


def _choice(value: Any, tools: Sequence[Any]) -> tuple[ToolChoice, bool]:
    """The choice, and whether there may be several calls."""
    if value is None:
        return read_choice(None, tools), True
    given = object_of("tool_choice", value, ("type", "name", "disable_parallel_tool_use"))
    kind = given.get("type")
    if kind not in CHOICES:
        problem = "is missing" if kind is None else f"={shown(kind)}"
        raise InvalidRequest("tool_choice.type", f"{problem}: must be one of {', '.join(CHOICES)}")
    if "name" in given and kind != "tool":
        raise InvalidRequest("tool_choice.name", f"={shown(given['name'])}: has a meaning only with type=tool")
    alone = flag("tool_choice.disable_parallel_tool_use", given.get("disable_parallel_tool_use", False))
    return read_choice({name: given[name] for name in ("type", "name") if name in given}, tools), not alone


def _output(value: Any) -> tuple[Constraint | None, str | None]:
    """What the answer must be, and how hard to think about it."""
    if value is None:
        return None, None
    given = object_of("output_config", value, ("format", "effort"))
    effort, form = given.get("effort"), given.get("format")
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise InvalidRequest("output_config.effort", f"={shown(effort)}: must be one of {', '.join(EFFORTS)}")
    if form is None:
        return None, effort
    form = object_of("output_config.format", form, ("type", "schema"))
    if form.get("type") != "json_schema":
        problem = "is missing" if form.get("type") is None else f"={shown(form['type'])}"
        raise InvalidRequest("output_config.format.type", f"{problem}: must be json_schema")
    where = "output_config.format.schema"
    if not isinstance(form.get("schema"), Mapping):
        problem = "is missing" if form.get("schema") is None else f"={shown(form['schema'])}"
        raise InvalidRequest(where, f"{problem}: must be a JSON Schema")
    try:
        return Constraint.json_schema(form["schema"]), effort
    except InvalidRequest as error:
        raise renamed(error, {"json_schema": where}) from None


def _thinking(value: Any, most: int | None, effort: str | None) -> tuple[ReasoningAsk, bool]:
    """How the model is to think, and whether it is shown. Not asked for: as its chat template does."""
    if value is None:
        return ReasoningAsk(), True
    given = object_of("thinking", value, ("type", "budget_tokens", "display"))
    kind, budget, display = given.get("type"), given.get("budget_tokens"), given.get("display", "summarized")
    if kind not in ("enabled", "disabled", "adaptive"):
        problem = "is missing" if kind is None else f"={shown(kind)}"
        raise InvalidRequest("thinking.type", f"{problem}: must be enabled, disabled or adaptive")
    if display not in ("summarized", "omitted"):
        raise InvalidRequest("thinking.display", f"={shown(display)}: must be summarized or omitted")
    if kind != "enabled":
        if budget is not None:
            raise InvalidRequest("thinking.budget_tokens", f"={shown(budget)}: has a meaning only with type=enabled")
        limit = EFFORTS[effort] if kind == "adaptive" and effort is not None else None
        return ReasoningAsk(kind == "adaptive", limit), display == "summarized"
    budget = integer("thinking.budget_tokens", budget, 1, 2**31 - 1)
    if most is not None and budget >= most:
        raise InvalidRequest("thinking.budget_tokens", f"={budget}: must be less than max_tokens={most}")
    return ReasoningAsk(True, budget), display == "summarized"


# ---- messages


@dataclass(slots=True)
class _Chat:
    """Messages in OpenAI's form, so far; ``calls``: ids of those that the assistant's last message made."""

    made: list[dict[str, Any]] = field(default_factory=list)
    calls: set[str] = field(default_factory=set)

    def say(self, role: str, content: str) -> dict[str, Any]:
        """Add to what ``role`` says last, or begin a message of it."""
        if not self.made or self.made[-1]["role"] != role:
            self.made.append({"role": role, "content": content})
        else:
            before = self.made[-1]["content"]
            self.made[-1]["content"] = before + ("\n" if role == "user" and before else "") + content
        return self.made[-1]


def _chat(value: Any, system: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        problem = "is missing" if value is None else f"={shown(value)}"
        raise InvalidRequest("messages", f"{problem}: must be a list of at least one message")
    chat = _Chat()
    if system is not None:
        told = [_text(where, block) for where, block in _blocks("system", system, ("text",))]
        if any(told):
            chat.say("system", "\n".join(told))
    for i, message in enumerate(value):
        where = f"messages[{i}]"
        given = object_of(where, message, ("role", "content"))
        role = given.get("role")
        if role == "user":
            _user(f"{where}.content", given.get("content"), chat)
        elif role == "assistant":
            _assistant(f"{where}.content", given.get("content"), chat)
        else:
            hint = "; what the system says goes into the field system" if role == "system" else ""
            problem = "is missing" if role is None else f"={shown(role)}"
            raise InvalidRequest(f"{where}.role", f"{problem}: must be user or assistant{hint}")
    last = chat.made[-1]
    if last["role"] == "assistant":
        where = f"messages[{len(value) - 1}]"
        if "tool_calls" in last:
            raise InvalidRequest(where, "ends with tool_use: the results of the calls must follow")
        if not last["content"]:
            chat.made.pop()
    if not chat.made or chat.made[-1]["role"] == "system":
        raise InvalidRequest("messages", "say nothing that could be answered")
    return tuple(chat.made)


def _user(where: str, content: Any, chat: _Chat) -> None:
    if content == []:
        raise InvalidRequest(where, "=[]: must hold at least one block")
    for place, block in _blocks(where, content, _USER):
        if block["type"] == "text":
            chat.say("user", _text(place, block))
            continue
        id = text(f"{place}.tool_use_id", block.get("tool_use_id"))
        if id not in chat.calls:
            hint = nearest(id, sorted(chat.calls)) if chat.calls else ""
            problem = f"={shown(id)}: no tool_use of the assistant's message before has this id{hint}"
            raise InvalidRequest(f"{place}.tool_use_id", problem)
        told = [_text(at, item) for at, item in _blocks(f"{place}.content", block.get("content", ""), ("text",))]
        failed = flag(f"{place}.is_error", block.get("is_error", False))
        result = "\n".join(told)
        chat.made.append({"role": "tool", "tool_call_id": id, "content": f"Error: {result}" if failed else result})


def _assistant(where: str, content: Any, chat: _Chat) -> None:
    message = chat.say("assistant", "")
    thought: list[str] = []
    for place, block in _blocks(where, content, _ASSISTANT):
        match block["type"]:
            case "text":
                message["content"] += _text(place, block)
            case "thinking":
                thought.append(text(f"{place}.thinking", block.get("thinking")))
            case "tool_use":
                calls = message.setdefault("tool_calls", [])
                if not calls:
                    chat.calls = set()
                calls.append(_call(place, block, chat))
    if any(thought):
        message["reasoning_content"] = message.get("reasoning_content", "") + "".join(thought)


def _call(place: str, block: Mapping[str, Any], chat: _Chat) -> dict[str, Any]:
    id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(id, str) or not id or id in chat.calls:
        problem = "is missing" if id is None else f"={shown(id)}"
        raise InvalidRequest(f"{place}.id", f"{problem}: must be a text that no other call of the message has")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{place}.name", f"{'is missing' if name is None else '=' + shown(name)}: must be a tool's name")  # fmt: skip
    if not isinstance(given, Mapping):
        problem = "is missing" if given is None else f"={shown(given)}"
        raise InvalidRequest(f"{place}.input", f"{problem}: must be an object")
    chat.calls.add(id)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}}  # fmt: skip


def _blocks(where: str, content: Any, valid: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The blocks of a content, each with its name; a text is one of them."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        problem = "is missing" if content is None else f"={shown(content)}"
        raise InvalidRequest(where, f"{problem}: must be a string or a list of blocks")
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if not isinstance(block, Mapping):
            raise InvalidRequest(place, f"={shown(block)}: must be an object")
        kind = block.get("type")
        if kind in _SEEN:
            raise InvalidRequest(f"{place}.type", f"={shown(kind)}: the model reads text only")
        if not isinstance(kind, str) or kind not in valid:
            problem = "is missing" if kind is None else f"={shown(kind)}"
            raise InvalidRequest(f"{place}.type", f"{problem}: must be {' or '.join(valid)}")
        yield place, object_of(place, block, _BLOCKS[kind])


def _text(place: str, block: Mapping[str, Any]) -> str:
    return text(f"{place}.text", block.get("text"))
