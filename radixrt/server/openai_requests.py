"""Reads the bodies of ``/v1/chat/completions`` and ``/v1/completions``: JSON in, a ``Job`` out, or one error that names the field.

Invariants: a field is honoured, refused, or one of ``IGNORED``, which have no meaning here; null is the same as left out. What needs
the model (vocabulary, context, whether a constraint compiles) is judged by the engine; ``Job.names`` are the body's names for its errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from radixrt.checks import flag, integer
from radixrt.engine.inputs import to_tokens
from radixrt.errors import InvalidRequest, nearest, shown
from radixrt.grammar.json_text import read_json
from radixrt.model.tokenizer import Tokenizer
from radixrt.request import SamplingParams
from radixrt.server.chat import ChatAsk, ReasoningAsk
from radixrt.server.dialects import NAMES, constraint_of, object_of, renamed
from radixrt.server.errors import Failure, RequestFailed, UnknownField
from radixrt.tools import read_choice, read_tools

MAX_NESTING = 220  # of a body; a schema inside it may take 200
MAX_SALT = 1024
_MAX_WARNINGS = 16
_TOKEN = re.compile(r"-?[0-9]{1,19}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

# Field of a body -> field of SamplingParams.
_PLAIN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "include_stop",
}
_COMMON = (
    "model",
    *_PLAIN,
    "logit_bias",
    "logprobs",
    "max_tokens",
    "stream",
    "stream_options",
    "echo",
    "priority",
    "cache_salt",
    *NAMES,
)
# Accepted for what they are, and without effect: who asks, what is kept of it elsewhere, hints for a cache that needs none.
IGNORED: dict[str, tuple[type, ...]] = {
    "user": (str,),
    "metadata": (dict,),
    "store": (bool,),
    "safety_identifier": (str,),
    "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,),
    "prompt_cache_options": (dict,),
    "service_tier": (str,),
}
CHAT = (
    *_COMMON,
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "thinking_budget",
    "separate_reasoning",
    *IGNORED,
)
COMPLETION = (*_COMMON, "prompt", "best_of", "suffix", *IGNORED)
_CHAT, _COMPLETION = dict.fromkeys(CHAT), dict.fromkeys(COMPLETION)  # in order, and found at once
# Fields of the API that a later version will have, and the values that ask for nothing.
LATER: dict[str, tuple[Any, ...]] = {
    "verbosity": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "structural_tag": (),
}
# What the API had before tools.
_OLD: dict[str, tuple[Any, ...]] = {"functions": ([],), "function_call": ("none",)}
# What only chats have.
_CHATS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "reasoning_effort": (),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# What clients send back of an answer of ours, and what a later version will read.
_MESSAGE_IGNORED = ("refusal", "annotations", "parsed")
_MESSAGE_LATER = ("function_call", "audio")
# Tokens of thinking; nothing: as many as it takes.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1024,
    "medium": 8192,
    "high": None,
    "xhigh": None,
    "max": None,
}
_RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template")


@dataclass(frozen=True, slots=True)
class Rules:
    """What a server takes, whatever is asked.

    Fields:
        models: names it answers to. template: defaults of ``chat_template_kwargs``.
        warn: an unknown field is answered with a warning in place of an error. prompts: most in one request.
    """

    models: tuple[str, ...]
    template: Mapping[str, Any] = field(default_factory=dict)
    warn: bool = False
    prompts: int = 2048


def rules_of(model: str, config: Any) -> Rules:
    """The rules of a server of this model; what ``config`` does not have has its default."""
    return Rules(
        models=tuple(getattr(config, "served_model_names", None) or (model,)),
        template=getattr(config, "default_chat_template_kwargs", None) or {},
        warn=getattr(config, "unknown_fields", "refuse") == "warn",
        prompts=getattr(config, "max_batch", 2048),
    )


@dataclass(frozen=True, slots=True)
class Job:
    """A request that was read.

    Fields:
        id: of the answer, and of its request in the engine. prompts: of completions, texts or token ids. ask: of a chat, all there is to it.
        params: of each prompt. echo: the prompt, or the message that is continued, comes before the text.
        names: fields of ``SamplingParams`` that the body has other names for. warnings: about fields that are not known.
    """

    kind: Literal["chat", "completion"]
    model: str
    params: SamplingParams
    id: str = ""
    prompts: tuple[Any, ...] = ()
    ask: ChatAsk | None = None
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def characters(self) -> int:
        """How much there is to tokenize, roughly."""
        return self.ask.characters if self.ask is not None else sum(map(len, self.prompts))


def read_body(data: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        InvalidRequest: not UTF-8, not JSON, no object, lone surrogates, duplicate keys, NaN or Infinity, nested too deeply.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"is not UTF-8: byte {error.start} is wrong") from None
    body = read_json("body", text, max_bytes=len(text), max_nesting=MAX_NESTING)
    if not isinstance(body, dict):
        raise InvalidRequest("body", f"must be a JSON object, not {type(body).__name__}")
    if _SURROGATE.search(text):  # a pair of them is a character, and is one by now
        for name, value in body.items():
            _check_text(name, name)
            _check_text(name, value)
    return body


def read_chat(body: Mapping[str, Any], rules: Rules, id: str = "") -> Job:
    """The job of a body of ``/v1/chat/completions``; ``id``: what it is to be called.

    Raises:
        InvalidRequest, RequestFailed: names the field and its value, and says what would be right.
    """
    body, warnings = _known(body, _CHAT, "chat/completions", rules)
    names: dict[str, str] = {"prompt": "messages"}
    messages = read_messages("messages", body.get("messages"), warn=rules.warn)
    continues = _flag(body, "continue_final_message")
    generation_prompt = _flag(body, "add_generation_prompt", not continues)
    if continues and generation_prompt:
        raise InvalidRequest(
            "add_generation_prompt", " and continue_final_message are both true: one of them must be false"
        )
    if continues and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
        raise InvalidRequest(
            "continue_final_message", "=true: the last message must be an assistant's that is not empty"
        )
    echo = _flag(body, "echo")
    if echo and not continues:
        raise InvalidRequest("echo", "=true: has a meaning in chats only with continue_final_message=true")
    logprobs = _flag(body, "logprobs")
    top = body.get("top_logprobs")
    if top is not None and not logprobs:
        raise InvalidRequest("top_logprobs", f"={shown(top)}: needs logprobs=true")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if "max_completion_tokens" in body:
        names["max_tokens"] = "max_completion_tokens"
        if body.get("max_tokens", limit) != limit:
            raise InvalidRequest(
                "max_tokens",
                f"={shown(body['max_tokens'])}: differs from max_completion_tokens={shown(limit)}; give one of them",
            )
    if limit is not None:
        limit = integer(names.get("max_tokens", "max_tokens"), limit, 1, 2**63 - 1)
    if top is not None:
        top = integer("top_logprobs", top, 0, 2**31 - 1)
    names["logprobs"] = "top_logprobs"
    params = _params(body, names, max_tokens=limit, logprobs=(top or 0) if logprobs else None)
    tools = read_tools("tools", body.get("tools"))
    choice = read_choice(body.get("tool_choice"), tools)
    if tools and choice.kind != "none":
        names.setdefault("constraint", "tools")
    template = {**rules.template, **_template(body)}
    way = _way(body)
    ask = ChatAsk(
        messages=messages,
        params=params,
        request_id=id,
        tools=tools,
        choice=choice,
        parallel=_flag(body, "parallel_tool_calls", True),
        reasoning=_reasoning(body, template),
        template=template,
        generation_prompt=generation_prompt,
        continues=continues,
        stream=way["stream"],
        model=_model(body, rules),
        priority=way["priority"],
        cache_salt=way["cache_salt"],
        names=names,
    )
    return Job("chat", ask.model, params, id, ask=ask, echo=echo, names=names, warnings=warnings, **way)


def _reasoning(body: Mapping[str, Any], template: dict[str, Any]) -> ReasoningAsk:
    """What a body says of thinking; ``template`` learns how hard it is to be, for the templates that know of it."""
    effort, budget = body.get("reasoning_effort"), body.get("thinking_budget")
    on: bool | None = None
    if effort is not None:
        if not isinstance(effort, str) or effort not in EFFORTS:
            raise InvalidRequest("reasoning_effort", f"={shown(effort)}: must be one of {', '.join(EFFORTS)}")
        on = effort != "none"
        if on:
            template.setdefault("reasoning_effort", effort)
    if budget is not None:
        budget = integer("thinking_budget", budget, 0, 2**31 - 1)
    elif on:
        budget = EFFORTS[str(effort)]
    for name in ("enable_thinking", "thinking"):  # what the template is told is what is meant
        if isinstance(template.get(name), bool):
            on = template[name]
    return ReasoningAsk(on, budget, _flag(body, "separate_reasoning", True))


def read_completion(body: Mapping[str, Any], rules: Rules, id: str = "") -> Job:
    """The job of a body of ``/v1/completions``; takes and raises what ``read_chat`` does."""
    body, warnings = _known(body, _COMPLETION, "completions", rules)
    names: dict[str, str] = {}
    if body.get("suffix"):
        raise InvalidRequest("suffix", f"={shown(body['suffix'])}: models served here do not fill in; leave it out")
    n, best_of = body.get("n", 1), body.get("best_of")
    if best_of is not None and integer("best_of", best_of, 1, 2**63 - 1) != n:
        raise InvalidRequest("best_of", f"={shown(best_of)}: only best_of=n is supported (n={shown(n)})")
    way, echo, logprobs = _way(body), _flag(body, "echo"), body.get("logprobs")
    if echo and logprobs is not None and way["stream"]:
        raise InvalidRequest("logprobs", f"={shown(logprobs)}: cannot be streamed together with echo=true")
    params = _params(
        body,
        names,
        max_tokens=body.get("max_tokens", 16),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    return Job(
        "completion",
        _model(body, rules),
        params,
        id,
        prompts=_prompts(body.get("prompt"), rules.prompts),
        echo=echo,
        names=names,
        warnings=warnings,
        **way,
    )


def tokens_of(job: Job, tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """The token ids of each prompt of completions; raises InvalidRequest."""
    try:
        if len(job.prompts) == 1:
            return [to_tokens(job.prompts[0], tokenizer, context).tolist()]
        return [_numbered(i, prompt, tokenizer, context) for i, prompt in enumerate(job.prompts)]
    except OverflowError:
        raise InvalidRequest("prompt", "has an id that is not in the vocabulary") from None


def _numbered(at: int, prompt: Any, tokenizer: Tokenizer, context: int) -> list[int]:
    try:
        ids: list[int] = to_tokens(prompt, tokenizer, context).tolist()
    except InvalidRequest as error:
        raise renamed(error, {"prompt": f"prompt[{at}]"}) from None
    return ids


def _known(
    body: Mapping[str, Any], valid: Mapping[str, None], owner: str, rules: Rules
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of a body that are not null; refuses, or warns about, those that nobody knows."""
    known: dict[str, Any] = {}
    warnings: list[str] = []
    for name, value in body.items():
        if name in valid:
            if value is None:
                continue
            if name in IGNORED and not isinstance(value, IGNORED[name]):
                what = {str: "a string", dict: "an object", bool: "true or false"}[IGNORED[name][0]]
                raise InvalidRequest(name, f"={shown(value)}: must be {what}")
            known[name] = value
        elif name in LATER:
            if value is not None and value not in LATER[name]:
                raise InvalidRequest(name, f"={shown(value)}: is not supported yet; a later version has it")
        elif name in _OLD:
            if value is not None and value not in _OLD[name]:
                new = "tools" if name == "functions" else "tool_choice"
                raise InvalidRequest(name, f"={shown(value)}: is of the past; use {new}")
        elif name in _CHATS:
            if value is not None and value not in _CHATS[name]:
                raise InvalidRequest(name, f"={shown(value)}: goes to /v1/chat/completions")
        elif name == "chat_template":
            if value is not None:
                raise InvalidRequest(
                    name, "cannot come with a request: the server has the model's, or its operator's own"
                )
        else:
            warnings += _unknown(owner, name, valid, rules)
    return known, tuple(warnings[:_MAX_WARNINGS])


def _unknown(owner: str, name: str, valid: Iterable[str], rules: Rules) -> list[str]:
    short = name if len(name) <= 80 else name[:77] + "..."
    problem = f"{owner} has no such field{nearest(name, valid)}"
    if not rules.warn:
        raise UnknownField(short, problem)
    return [f"{short} was ignored: {problem}"]


def _model(body: Mapping[str, Any], rules: Rules) -> str:
    name = body.get("model", rules.models[0])
    if not isinstance(name, str):
        raise InvalidRequest("model", f"={shown(name)}: must be a string")
    if name not in rules.models:
        problem = f"model={shown(name)}: is not served here{nearest(name, rules.models)}"
        raise RequestFailed(Failure(404, problem, "model", "model_not_found"))
    return name


def _params(body: Mapping[str, Any], names: dict[str, str], **more: Any) -> SamplingParams:
    """Sampling parameters of a body; ``names`` learns what the body calls them."""
    names["include_stop"] = "include_stop_str_in_output"
    values = {_PLAIN[name]: value for name, value in body.items() if name in _PLAIN}
    if "logit_bias" in body:
        values["logit_bias"] = _biases(body["logit_bias"])
    asked = constraint_of(body)
    if asked is not None:
        values["constraint"] = asked.constraint
        names["constraint"] = asked.field
    try:
        return SamplingParams(**values, **more)
    except InvalidRequest as error:
        raise renamed(error, names) from None


def _way(body: Mapping[str, Any]) -> dict[str, Any]:
    """How it is answered, and when."""
    stream, options = _flag(body, "stream"), body.get("stream_options")
    include_usage = False
    if options is not None:
        if not stream:
            raise InvalidRequest("stream_options", f"={shown(options)}: needs stream=true")
        options = object_of("stream_options", options, ("include_usage", "include_obfuscation"))
        for name, value in options.items():
            flag(f"stream_options.{name}", value)
        include_usage = options.get("include_usage", False)
    salt = body.get("cache_salt", "")
    if not isinstance(salt, str) or len(salt) > MAX_SALT:
        raise InvalidRequest("cache_salt", f"={shown(salt)}: must be a string of at most {MAX_SALT} characters")
    return {
        "stream": stream,
        "include_usage": include_usage,
        "priority": integer("priority", body.get("priority", 0), -(2**31), 2**31 - 1),
        "cache_salt": salt,
    }


def _flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
    return flag(name, body.get(name, default))


def _biases(value: Any) -> dict[int, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias", f"={shown(value)}: must be an object that maps token ids to numbers")
    biases: dict[int, Any] = {}
    for key, bias in value.items():
        if not _TOKEN.fullmatch(key):
            raise InvalidRequest("logit_bias", f" has the key {shown(key)}: must be a token id")
        if int(key) in biases:
            raise InvalidRequest("logit_bias", f" has the token {int(key)} twice")
        biases[int(key)] = bias
    return biases


def _template(body: Mapping[str, Any]) -> dict[str, Any]:
    value = body.get("chat_template_kwargs", {})
    if not isinstance(value, dict):
        raise InvalidRequest("chat_template_kwargs", f"={shown(value)}: must be an object")
    for name in value:
        if name in _RESERVED or name.endswith("_token"):
            raise InvalidRequest(f"chat_template_kwargs.{shown(name).strip(chr(39))}", "is not for a request to set")
    return value


def read_messages(field: str, value: Any, *, warn: bool = False) -> tuple[dict[str, Any], ...]:
    """Messages in OpenAI's form, checked: contents are texts, calls have their ``id``, ``type`` and ``function``.

    Args:
        warn: fields that nobody knows are left out, in place of an error.
    """
    if not isinstance(value, list) or not value:
        problem = "is missing" if value is None else f"={shown(value)}"
        raise InvalidRequest(field, f"{problem}: must be a list of at least one message")
    return tuple(_message(f"{field}[{i}]", message, warn) for i, message in enumerate(value))


def _message(where: str, message: Any, warn: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(where, f"={shown(message)}: must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        problem = "is missing" if role is None else f"={shown(role)}"
        raise InvalidRequest(f"{where}.role", f"{problem}: must be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if len(message) == 2 and isinstance(content, str) and role != "tool":  # as nearly all are
        return {"role": _ROLES[role], "content": content}
    for name, item in message.items():
        if name in _MESSAGE_LATER and item not in (None, []):
            raise InvalidRequest(f"{where}.{name}", f"={shown(item)}: is not supported; calls are in tool_calls")
        if name not in (*_MESSAGE, *_MESSAGE_IGNORED, *_MESSAGE_LATER, "reasoning") and not warn:
            raise UnknownField(
                f"{where}.{shown(name).strip(chr(39))}", f"there is no such field{nearest(name, _MESSAGE)}"
            )
    found: dict[str, Any] = {"role": _ROLES[role]}
    calls = message.get("tool_calls")
    thought = message.get("reasoning_content", message.get("reasoning"))
    for name, owner, item in (
        ("tool_calls", "assistant", calls),
        ("reasoning_content", "assistant", thought),
        ("tool_call_id", "tool", message.get("tool_call_id")),
    ):
        if item is not None and role != owner:
            raise InvalidRequest(f"{where}.{name}", f"={shown(item)}: belongs to a message of role {owner}")
    if calls is not None and not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls", f"={shown(calls)}: must be a list of calls")
    if calls and content in (None, []):
        found["content"] = ""
    else:
        found["content"] = _content(f"{where}.content", content)
    if calls:
        found["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if role == "tool":
        found["tool_call_id"] = _text(f"{where}.tool_call_id", message.get("tool_call_id"))
    for name, item in (("name", message.get("name")), ("reasoning_content", thought)):
        if item is not None:
            found[name] = _text(f"{where}.{name}", item)
    return found


def _call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequest(where, f"={shown(call)}: must be an object with id, type and function")
    kind, function = call.get("type", "function"), call.get("function")
    if kind != "function":
        raise InvalidRequest(f"{where}.type", f"={shown(kind)}: must be function")
    if not isinstance(function, dict):
        problem = "is missing" if function is None else f"={shown(function)}"
        raise InvalidRequest(f"{where}.function", f"{problem}: must be an object with name and arguments")
    name = _text(f"{where}.function.name", function.get("name"))
    arguments = _text(f"{where}.function.arguments", function.get("arguments"))
    id = _text(f"{where}.id", call.get("id"))
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(where, f"{'is missing' if value is None else '=' + shown(value)}: must be a string")
    return value


def _content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        problem = "is missing" if content is None else f"={shown(content)}"
        raise InvalidRequest(where, f"{problem}: must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            raise InvalidRequest(f"{where}[{i}]", f"={shown(part)}: must be an object")
        if part.get("type") != "text":
            problem = f"={shown(part.get('type'))}: the model reads text only; parts must be of type text"
            raise InvalidRequest(f"{where}[{i}].type", problem)
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}].text", f"={shown(part.get('text'))}: must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(value: Any, most: int) -> tuple[Any, ...]:
    """One prompt or a list of them; each a text or token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        problem = "is missing" if value is None else f"={shown(value)}"
        raise InvalidRequest("prompt", f"{problem}: must be a text, a list of token ids, or a list of one of these")
    if isinstance(value[0], dict):
        raise InvalidRequest("prompt", f"={shown(value)}: chat messages go to /v1/chat/completions")
    if not isinstance(value[0], (str, list)):  # numbers: one prompt; whatever else is in it is found with them
        return (value,)
    if len(value) > most:
        raise InvalidRequest("prompt", f"holds {len(value)} prompts: at most {most} are taken at once")
    for i, prompt in enumerate(value):
        if type(prompt) is not type(value[0]):
            raise InvalidRequest(f"prompt[{i}]", f"={shown(prompt)}: all must be texts, or all lists of token ids")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            raise InvalidRequest(f"prompt[{i}]", f"={shown(prompt)}: must be a list of token ids")
    return tuple(value)


def _check_text(name: str, value: Any) -> None:
    """Raises InvalidRequest where a text in ``value`` has half a character; bounded, since a body's nesting is."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            code, shorter = ord(value[error.start]), name.encode(errors="replace").decode()
            raise InvalidRequest(shorter, f"is not Unicode text: it has the lone surrogate U+{code:04X}") from None
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_text(name, key)
            _check_text(name, item)
    elif isinstance(value, list):
        for item in value:
            _check_text(name, item)
