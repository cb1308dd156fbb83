"""ChatTemplate owns one model's chat template: messages are checked here, then rendered in the bounded sandbox.

Invariants: a template sees only plain JSON values, copied; a malformed chat is an InvalidRequest naming
``messages[i].field``, a broken or greedy template a ModelError naming the model; rendering one template is serialized.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.model.template_sandbox import Budget, LimitExceeded, MeteredEnvironment, RaisedByTemplate, render_bounded

MAX_SOURCE = 2**20
MAX_MESSAGES = 65536
_MAX_DEPTH = 32


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source, at most ``MAX_SOURCE`` characters.
        name: the model, for errors.
        time_limit: seconds one render may take.
        max_output: characters it may write.

    Raises:
        ModelError: the source does not compile.
    """

    def __init__(
        self, source: str, *, name: str = "model", time_limit: float = 5.0, max_output: int = 8 * 2**20
    ) -> None:
        self._name, self._time_limit, self._max_output = name, time_limit, max_output
        self._lock = threading.Lock()
        if len(source) > MAX_SOURCE:
            raise self._error(f"has {len(source)} characters, at most {MAX_SOURCE} are read")
        self._environment = MeteredEnvironment()
        try:
            self._template = self._environment.from_string(source)
        except TemplateSyntaxError as error:
            raise self._error(f"line {error.lineno}: {error.message}") from None
        except Exception as error:
            raise self._error(f"cannot be compiled ({type(error).__name__}: {error})") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The text of a chat. ``kwargs`` are the template's other variables (``tools``, ``bos_token``, ...).

        Raises:
            InvalidRequest: malformed messages, or messages the template itself refuses.
            ModelError: the template fails, or takes more time or memory than it may.
        """
        variables = {name: _plain(name, value) for name, value in kwargs.items()}
        variables["messages"] = checked_messages(messages)
        variables["add_generation_prompt"] = bool(add_generation_prompt)
        variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        with self._lock:
            budget = Budget(self._time_limit, max_value=2 * self._max_output, max_total=64 * self._max_output)
            try:
                return render_bounded(self._environment, self._template, variables, budget, self._max_output)
            except RaisedByTemplate as error:
                raise InvalidRequest("messages", f"refused by the chat template: {error.message}") from None
            except LimitExceeded as error:
                raise self._error(str(error.message)) from None
            except SecurityError as error:
                raise self._error(f"is not allowed to: {error.message}") from None
            except RecursionError:
                raise self._error("calls itself too deeply") from None
            except TemplateError as error:
                raise self._error(f"failed: {error.message}") from None
            except Exception as error:
                raise self._error(f"failed: {type(error).__name__}: {str(error)[:500]}") from None

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"{self._name}: chat template {problem}")


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as templates expect them: dicts with ``role`` and, as a string, ``content``; keys of value None left out.

    Content given as text parts becomes one string, a part to a line.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages", f"must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages", "must have at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"has {len(messages)} messages, at most {MAX_MESSAGES} are taken")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, f"must be an object with role and content, not {type(message).__name__}")
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise InvalidRequest(field, f"has the key {shown(key)}: keys must be strings")
        if value is not None:
            plain[key] = value if key == "content" else _plain(f"{field}.{key}", value)
    role = plain.get("role")
    if not isinstance(role, str) or not role:
        problem = "is missing" if role is None else f"={shown(role)}: must be a non-empty string"
        raise InvalidRequest(f"{field}.role", problem)
    if "content" in plain:
        plain["content"] = _text(f"{field}.content", plain["content"])
    elif not plain.get("tool_calls"):
        raise InvalidRequest(f"{field}.content", "is missing")
    return plain


def _text(field: str, content: Any) -> str:
    if isinstance(content, str):
        return str(content)
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        raise InvalidRequest(field, f"must be a string or a list of text parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{field}[{i}]", f"must be an object, not {type(part).__name__}")
        if part.get("type") != "text":
            raise InvalidRequest(f"{field}[{i}].type", f"={shown(part.get('type'))}: only 'text' is supported")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{field}[{i}].text", "must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(field: str, value: Any, depth: int = 0) -> Any:
    """A copy in JSON's own types, so that no object with methods of its own reaches a template."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if value.bit_length() > 1024:
            raise InvalidRequest(field, "is a number of more than 1024 bits")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidRequest(field, f"={value}: must be finite")
        return float(value)
    if depth >= _MAX_DEPTH:
        raise InvalidRequest(field, f"is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidRequest(field, f"has the key {shown(key)}: keys must be strings")
        return {str(key): _plain(f"{field}.{key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(f"{field}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise InvalidRequest(field, f"must be made of JSON values, not {type(value).__name__}")
