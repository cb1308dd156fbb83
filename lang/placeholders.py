"""Placeholders stand for what is not known while a function is traced: its arguments and what it generates.

Formatting one into a text leaves a mark in it that ``parts_of`` finds again. Anything else a body does with one needs the value, and ends the trace.

Invariants: marks cannot be guessed, so no text from outside is taken for one; a mark that was cut or changed ends the trace too.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lang.errors import UsageError, author_line
from radixrt.engine.nodes import Arg, Part, Ref, Template

_KEY = secrets.token_hex(8)
_OPEN, _CLOSE = "\ue010" + _KEY, _KEY + "\ue011"
_MARK = re.compile(f"{_OPEN}(?:a:([^\ue011]*?)|r:(\\d+):(\\d+)){_CLOSE}")


class NeedsValue(BaseException):
    """A traced body needs a value that only a run can give. No ``Exception``: a body's own ``except`` does not catch it."""


class Placeholder:
    """An argument or a generated text, not known yet."""

    __slots__ = ("_part", "_used")

    def __init__(self, part: Arg | Ref) -> None:
        self._part = part
        self._used = False

    @property
    def used_as_text(self) -> bool:
        """Whether it was appended or formatted; one that was read and never was may have been used in a way that nobody saw."""
        return self._used

    def as_parts(self) -> Template:
        self._used = True
        return (self._part,)

    def __str__(self) -> str:
        self._used = True
        part = self._part
        inner = f"a:{part.name}" if isinstance(part, Arg) else f"r:{part.node}:{part.sample}"
        return _OPEN + inner + _CLOSE

    def __repr__(self) -> str:
        raise NeedsValue

    def __format__(self, spec: str) -> str:
        if spec:
            raise NeedsValue
        return str(self)

    def __add__(self, other: Any) -> str:
        return str(self) + str(other) if isinstance(other, (str, Placeholder)) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return str(other) + str(self) if isinstance(other, (str, Placeholder)) else NotImplemented

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """``str``: what it stands for, and what ``isinstance`` is told."""
        return str

    def _needs(self, *_: Any, **__: Any) -> NoReturn:
        raise NeedsValue

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python asks for these by itself
            raise AttributeError(name)
        raise NeedsValue

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _needs
    )
    __hash__ = __int__ = __float__ = __index__ = __mul__ = __mod__ = __sub__ = __call__ = _needs


def is_placeholder(value: object) -> bool:
    return type(value) is Placeholder


def parts_of(text: Any) -> Template:
    """A text as parts: what stands in it as it is, and what it names."""
    if type(text) is Placeholder:
        return text.as_parts()
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not Unicode: it has a lone surrogate at character {error.start}", author_line()
            ) from None
    if _KEY not in text:
        return (str(text),) if text else ()
    parts: list[Part] = []
    at = 0
    for match in _MARK.finditer(text):
        if match.start() > at:
            parts.append(text[at : match.start()])
        parts.append(Arg(match[1]) if match[1] is not None else Ref(int(match[2]), int(match[3])))
        at = match.end()
    if at < len(text):
        parts.append(text[at:])
    if any(isinstance(part, str) and _KEY in part for part in parts):
        raise NeedsValue
    return tuple(parts)


def marked(text: object) -> bool:
    """Whether a text has a mark in it."""
    return isinstance(text, str) and _KEY in text


def filled(value: Any, read: Callable[[Ref], Any], arguments: Mapping[str, Any]) -> Any:
    """A value of a traced body, with its placeholders (in lists and dicts too) replaced by what they stand for."""
    if type(value) is Placeholder:
        part = value.as_parts()[0]
        return arguments[part.name] if isinstance(part, Arg) else read(part)  # type: ignore[arg-type]
    if isinstance(value, str) and marked(value):
        texts = (p if isinstance(p, str) else filled(Placeholder(p), read, arguments) for p in parts_of(value))
        return "".join(texts)
    if type(value) in (list, tuple):
        return type(value)(filled(item, read, arguments) for item in value)
    if type(value) is dict:
        return {key: filled(item, read, arguments) for key, item in value.items()}
    return value
