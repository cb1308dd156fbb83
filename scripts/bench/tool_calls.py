"""Constrained tool calls of the default model at temperature 1.0: do the arguments of every one parse and validate?

python scripts/bench/tool_calls.py [--calls 2000] [--format json] [--choice required]    40 tools, each named in turn or chosen freely

Prints a line of JSON: calls asked for, calls read, argument objects that parse, that ``jsonschema`` calls valid, answers cut by their
budget, and seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import jsonschema

from radixrt import Engine, SamplingParams
from radixrt.tools import ChatParser, Tool, ToolChoice, answer_of, template_chat
from radixrt.tools.formats import TOOL_FORMATS

S = {"type": "string", "maxLength": 24}
I = {"type": "integer", "minimum": 0, "maximum": 1000}
N = {"type": "number", "minimum": -1000, "maximum": 1000, "multipleOf": 0.25}
B = {"type": "boolean"}
DATE = {"type": "string", "format": "date"}


def _list(items: Any, low: int = 0, high: int = 4) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


def _object(required: str = "", /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def _one(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


_POINT = _object("lat lon", lat={**N, "minimum": -90, "maximum": 90}, lon={**N, "minimum": -180, "maximum": 180})
_PERSON = _object(
    "name", name=S, age={**I, "maximum": 120}, email={"type": "string", "format": "email", "maxLength": 30}
)
_LINE = _object("item count", item=S, count={**I, "minimum": 1}, gift=B)
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": _object("city", city=S, unit=_one("celsius", "fahrenheit"), days={**I, "minimum": 1, "maximum": 14}),
    "add": _object("a b", a=N, b=N),
    "search": _object("query", query=S, limit=I, safe=B),
    "send_email": _object("to subject body", to=_list(S, 1), subject=S, body={"type": "string", "maxLength": 60}, urgent=B),
    "now": _object(),
    "set_alarm": _object("time", time={"type": "string", "pattern": "^([01]\\d|2[0-3]):[0-5]\\d$"}, label=S, repeat=_list(_one(*"MTWRFSU"), 0, 7)),
    "convert": _object("amount source target", amount=N, source=_one("EUR", "USD", "JPY"), target=_one("EUR", "USD", "JPY")),
    "route": _object("start end", start=_POINT, end=_POINT, mode=_one("car", "bike", "walk")),
    "book_flight": _object("origin target day", origin={"type": "string", "pattern": "^[A-Z]{3}$"}, target={"type": "string", "pattern": "^[A-Z]{3}$"}, day=DATE, seats={**I, "minimum": 1, "maximum": 9}),
    "create_user": _object("user", user=_PERSON, admin=B),
    "order": _object("lines", lines=_list(_LINE, 1, 3), note={"type": ["string", "null"], "maxLength": 20}),
    "query": _object("table", table=_one("users", "orders"), where=_list(_object("field op value", field=S, op=_one("=", "<", ">"), value={"anyOf": [S, I, B, {"type": "null"}]}), 0, 3)),
    "paint": _object("colour", colour={"type": "string", "pattern": "^#[0-9a-f]{6}$"}, width=I),
    "toggle": _object("device on", device=S, on=B),
    "tag": _object("tags", tags={**_list(_one("red", "green", "blue", "black"), 1, 3), "uniqueItems": True}),
    "translate": _object("text to", text=S, to=_one("de", "fr", "ja", "zh")),
    "play": _object("", artist=S, album=S, track=S),
    "volume": _object("level", level={"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": 5}),
    "uuid": _object("id", id={"type": "string", "format": "uuid"}),
    "address": _object("ip", ip={"type": "string", "format": "ipv4"}, port={**I, "maximum": 65535}),
    "either": {"type": "object", "oneOf": [_object("id", id=I), _object("name", name=S)]},
    "shape": {"type": "object", "anyOf": [_object("kind r", kind={"const": "circle"}, r=N), _object("kind w h", kind={"const": "box"}, w=N, h=N)]},
    "labels": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 8}, "maxProperties": 3},
    "scores": {"type": "object", "patternProperties": {"^[a-z]{1,4}$": I}, "additionalProperties": False, "maxProperties": 3},
    "pair": _object("pair", pair={"type": "array", "prefixItems": [S, I], "items": False, "minItems": 2}),
    "matrix": _object("rows", rows=_list(_list(I, 1, 3), 1, 3)),
    "tree": {**_object("root", root={"$ref": "#/$defs/node"}), "$defs": {"node": _object("value", value=I, left={"$ref": "#/$defs/leaf"}), "leaf": _object("value", value=B)}},
    "note": _object("text", text={"type": "string", "minLength": 1, "maxLength": 40}),
    "poll": _object("question options", question=S, options=_list(S, 2, 4), many=B),
    "range": _object("low high", low={"type": "integer", "exclusiveMinimum": 0, "maximum": 9}, high={"type": "integer", "minimum": 10, "exclusiveMaximum": 100}),
    "maybe": _object("value", value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    "fixed": _object("version", version={"const": 2}, name=S),
    "unicode": _object("größe", größe=I, 名前=S),
    "dashed": _object("content-type", **{"content-type": _one("text", "json"), "x-id": I}),
    "deep": _object("a", a=_object("b", b=_object("c", c=_object("d", d=B)))),
    "flags": _object("one two three", one=B, two=B, three=B),
    "dependent": {"type": "object", "properties": {"card": I, "code": I}, "dependentRequired": {"card": ["code"]}, "additionalProperties": False},
    "not_empty": {"type": "object", "properties": {"a": B, "b": B}, "minProperties": 1, "additionalProperties": False},
    "when": _object("at", at={"anyOf": [DATE, {"const": "now"}]}, zone=S),
    "file": _object("path text", path={"type": "string", "pattern": "^/[a-z]{1,8}(/[a-z]{1,8}){0,2}$"}, text={"type": "string", "maxLength": 60}, mode=_one("w", "a")),
}  # fmt: skip
QUESTIONS = ("Please help me with this.", "Do it, and be quick.", "What would you call?", "Use a tool for my task.")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--calls", type=int, default=2000)
    arguments.add_argument("--format", default="json", choices=sorted(TOOL_FORMATS))
    arguments.add_argument("--choice", default="named", choices=("named", "required"))
    arguments.add_argument("--max-tokens", type=int, default=400)
    given = arguments.parse_args()
    tools = tuple(Tool(name, f"Tool {name}.", schema) for name, schema in SCHEMAS.items())
    by_name = {tool.name: tool for tool in tools}
    format = TOOL_FORMATS[given.format]
    counts = dict.fromkeys(("answers", "calls", "parse", "valid", "cut"), 0)
    with Engine() as engine:
        prompts, params = [], []
        for i in range(given.calls):
            tool = tools[i % len(tools)]
            choice = ToolChoice("named", tool.name) if given.choice == "named" else ToolChoice("required")
            question = [{"role": "user", "content": f"{QUESTIONS[i // len(tools) % len(QUESTIONS)]} ({tool.name})"}]
            chat, more = template_chat("messages", question, (tool,), format, engine.tokenizer.chat_template)
            prompts.append(engine.tokenizer.encode_chat(chat, **more))
            constraint = format.constraint(tools, choice, parallel=False)
            params.append(SamplingParams(temperature=1.0, seed=i, max_tokens=given.max_tokens, constraint=constraint))
        begin = time.perf_counter()
        for i, completion in enumerate(engine.generate(prompts, params)):
            parser = ChatParser(format, None, tools, request_id=str(i))
            answer = answer_of(parser.push(completion.text) + parser.finish())
            counts["answers"] += 1
            counts["cut"] += completion.finish_reason == "length"
            for call in answer.calls:
                counts["calls"] += 1
                try:
                    value = json.loads(call.arguments)
                    counts["parse"] += 1
                    schema = {"type": "object", **by_name[call.name].parameters}
                    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
                    counts["valid"] += 1
                except (ValueError, jsonschema.ValidationError) as error:
                    print(f"{call.name}: {call.arguments}: {error}", file=sys.stderr)
        seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "format": given.format,
                "choice": given.choice,
                "tools": len(tools),
                **counts,
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
