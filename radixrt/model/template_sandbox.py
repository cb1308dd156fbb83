"""Owns the jinja2 environment chat templates run in: what a template may call, and how much time and memory it may take.

A template comes with a model from a stranger. jinja2's sandbox keeps it away from Python's internals; this room bounds
its cost, in the caller's thread, with nothing left running:

- *Time.* Every loop iteration, call, filter and operator looks at a deadline. What runs between two looks
  is linear in values of bounded size; searches that are not (``strip`` by a set, searches from the right) are bounded
  by the product of their operands.
- *Size.* A value's weight is its characters plus ``NODE`` for every element, counted as a tree. Whatever can make a new
  value (operators, ``~``, literals, slices, calls, filters, block assignments) is *admitted*: refused when one value
  weighs more than ``max_value``, or all of them together more than ``max_total``. Operations whose result can be much
  larger than their operands (``*``, ``**``, formatting, padding, ``replace``, ``join``, ``indent``...) are checked
  before they run.
- *Names.* Filters and methods of built-in values that are not listed here do not exist: an unknown one is an error.

Invariants: a template that raises none of these errors renders as in transformers' own environment; values in a template
are plain str, int, float, bool, None, list, tuple, dict (jinja's Markup only under ``{% autoescape %}``).
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

NODE = 64  # weight of an element: about what its pointer and its object take
MAX_DEPTH = 64
MAX_INT_BITS = 4096
MAX_WORK = 10**8  # characters compared by one operation that is not linear
_CONTAINERS: tuple[type[Collection[Any]], ...] = (
    list,
    tuple,
    dict,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STR_METHODS = _words(
    "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric"
    " isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix replace rfind rindex rjust"
    " rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _STR_METHODS,
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"count", "index"}),
    float: frozenset({"is_integer"}),
    int: frozenset(),
    bytes: frozenset(),
    set: frozenset(),
    frozenset: frozenset(),
}
_FILTERS = _words(
    "abs capitalize count d default dictsort first float groupby int items last length list lower map max min reject"
    " rejectattr reverse select selectattr sort string title trim truncate unique upper wordcount"
    " batch center format indent join replace round slice"
)
_LAZY = _words("map select reject selectattr rejectattr list join sort unique groupby min max")
_PERCENT_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d{5,}|\d*\.(?:\*|\d{5,}))")
_LONG_NUMBER = re.compile(r"\d{5,}")


class LimitExceeded(TemplateRuntimeError):
    """The template takes more time or memory than it may."""


class RaisedByTemplate(TemplateError):
    """The template called ``raise_exception``: it refuses the messages."""


class Budget:
    """What one render may still use. ``weights`` holds the containers alive so that their ids stay theirs."""

    def __init__(self, seconds: float, max_value: int, max_total: int) -> None:
        self.seconds, self.max_value, self.max_total = seconds, max_value, max_total
        self.deadline = time.monotonic() + seconds
        self.total = 0
        self.weights: dict[int, tuple[Any, int, int]] = {}

    def tick(self) -> bool:
        if time.monotonic() > self.deadline:
            raise LimitExceeded(f"takes longer than {self.seconds:g} s")
        return True

    def check(self, weight: int) -> None:
        """Refuse a value that would weigh this much."""
        if weight > self.max_value:
            raise LimitExceeded(f"makes a value of more than {self.max_value} characters")

    def charge(self, weight: int) -> None:
        self.check(weight)
        self.total += weight
        if self.total > self.max_total:
            raise LimitExceeded(f"makes values of more than {self.max_total} characters altogether")
        self.tick()

    def admit(self, value: Any) -> Any:
        """Let a new value in, or refuse it. Charged is what is new: a container's elements were charged before."""
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, _CONTAINERS):
            self.check(self.weigh(value))
            self.charge(NODE * (1 + len(value)))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise LimitExceeded(f"makes a number of more than {MAX_INT_BITS} bits")
        return value

    def weigh(self, value: Any) -> int:
        """Characters and elements of a value counted as a tree. Template values never change, so weights are kept."""
        return self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """Weight and depth. Depth is bounded because C code that hashes or compares nested tuples recurses unchecked."""
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, _CONTAINERS):
            return 0, 0
        known = self.weights.get(id(value))
        if known is not None:
            return known[1:]
        weight, depth = NODE, 0
        for part in (value, value.values()) if isinstance(value, dict) else (value,):
            for item in part:
                item_weight, item_depth = self._measure(item)
                weight += NODE + item_weight
                depth = max(depth, item_depth)
        if depth >= MAX_DEPTH:
            raise LimitExceeded(f"nests values more than {MAX_DEPTH} deep")
        self.weights[id(value)] = (value, weight, depth + 1)
        return weight, depth + 1

    def ticking(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.tick()
            yield item


class _Metered(NodeTransformer):
    """Puts the meter into a parsed template: loops tick, and expressions that make values pass through ``admit``."""

    def _through(self, callback: str, *args: nodes.Expr) -> nodes.Call:
        return nodes.Call(
            nodes.EnvironmentAttribute(callback), list(args), [], None, None, lineno=args[0].lineno if args else 1
        )

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._through("tick"), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._through("concatenated", *node.nodes)

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or all(
            isinstance(item, nodes.Const) for item in getattr(node, "items", ())
        ):
            return node
        return self._through("admit", node)

    visit_List = visit_Tuple = visit_Dict = _literal

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._through("admit", node) if isinstance(node.arg, nodes.Slice) else node


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; rendering, it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"namespace attribute {name!r} begins with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # the values may contain the namespace itself
        return "<Namespace>"


class _Formatter(SandboxedFormatter):
    def __init__(self, env: MeteredEnvironment) -> None:
        super().__init__(env)
        self._budget = env.budget

    def format_field(self, value: Any, format_spec: str) -> Any:
        if _LONG_NUMBER.search(format_spec):
            raise LimitExceeded(f"pads to a width of {format_spec!r}")
        text = super().format_field(value, format_spec)
        self._budget.charge(len(text))
        return text


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of one template. ``budget`` is set for each render; renders of one environment do not overlap."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        self.budget = Budget(0.0, 0, 0)
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,  # nothing is computed while compiling
            finalize=pass_context(lambda context, value: self._printed(value)),
        )
        # EnvironmentAttribute nodes name these
        self.tick = lambda: self.budget.tick()
        self.admit = lambda value: self.budget.admit(value)
        self.concatenated = self._concatenated
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals = {
            "range": self.globals["range"],
            "joiner": self.globals["joiner"],
            "cycler": self.globals["cycler"],
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: self._metered(name, FILTERS[name]) for name in _FILTERS}
        own: dict[str, Callable[..., Any]] = {
            "tojson": self._tojson,
            "sum": self._sum,
            "safe": str,
            "e": _escaped,
            "escape": _escaped,
        }
        self.filters |= {name: self._metered(name, filter) for name, filter in own.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    # -- expressions

    def _printed(self, value: Any) -> str:
        text = str(value)  # linear: value was admitted
        self.budget.tick()
        return text

    def _concatenated(self, *values: Any) -> str:
        texts = [value if isinstance(value, str) else str(value) for value in values]
        self.budget.check(sum(map(len, texts)))
        return "".join(texts)

    def _concat(self, pieces: Iterable[str]) -> str:
        pieces = list(pieces)
        self.budget.charge(sum(map(len, pieces)))
        return "".join(pieces)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        if operator == "*":
            for sized, times in ((left, right), (right, left)):
                if hasattr(sized, "__len__") and isinstance(times, int):
                    budget.check((budget.weigh(sized) + len(sized)) * max(times, 0))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
            if left.bit_length() * right > 2 * MAX_INT_BITS and abs(left) > 1:
                raise LimitExceeded(f"makes a number of more than {MAX_INT_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        return budget.admit(super().call_binop(context, operator, left, right))

    def _check_percent(self, form: str, values: Any) -> None:
        if _PERCENT_WIDTH.search(form):
            raise LimitExceeded("formats to a width of more than 9999 characters")
        self.budget.check(
            len(form) + form.count("%") * (self.budget.weigh(values) + (9999 if _has_width(form) else 64))
        )

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        if attribute.startswith("_"):
            raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if not isinstance(text, str) or getattr(value, "__name__", "") not in ("format", "format_map"):
            return None

        def bounded_format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                return _Formatter(self).vformat(text, (), args[0])
            return _Formatter(self).vformat(text, args, kwargs)

        return bounded_format

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.budget.tick()
        owner = getattr(function, "__self__", None)
        for kind, methods in _METHODS.items():
            if isinstance(owner, kind):
                name = function.__name__
                if name not in methods:
                    raise SecurityError(f"method {name!r} of {kind.__name__} is not available to chat templates")
                if kind is str:
                    if name == "join":  # its length must be known before
                        args = tuple(list(self.budget.ticking(arg)) for arg in args)
                    self._check_str_method(name, str(owner), args, kwargs)
        return self.budget.admit(super().call(context, function, *args, **kwargs))

    def _check_str_method(self, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check = self.budget.check
        if name in ("center", "ljust", "rjust", "zfill"):
            check(args[0] if args and isinstance(args[0], int) else 0)
        elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
            check(_replaced_length(text, args[0], args[1]))
        elif name == "join" and args:
            self._check_join(args[0], text)
        elif name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"):
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, str) and len(arg) * len(text) > MAX_WORK:
                    raise LimitExceeded(f"compares {len(arg)} x {len(text)} characters in {name!r}")

    def _check_join(self, items: Any, between: str) -> None:
        weight, count = self.budget.weigh(items), len(items) if hasattr(items, "__len__") else 0
        self.budget.check(weight + count * len(between))

    # -- filters

    def _metered(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter behind a check of its arguments and before an admission of its result."""
        skip = 1 if hasattr(filter, "jinja_pass_arg") else 0

        @functools.wraps(filter)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            head, value, rest = args[:skip], args[skip], args[skip + 1 :]
            if name in _LAZY and isinstance(value, Iterable) and not isinstance(value, (dict, Undefined)):
                value = self.budget.ticking(value)
                if name == "join":  # its length must be known before
                    value = list(value)
            self._check_filter(name, value, rest, kwargs)
            return self.budget.admit(filter(*head, value, *rest, **kwargs))

        return metered

    def _check_filter(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check = self.budget.check

        def argument(position: int, key: str, default: Any) -> Any:
            return args[position] if len(args) > position else kwargs.get(key, default)

        if name == "replace":
            check(_replaced_length(str(value), str(argument(0, "old", "")), str(argument(1, "new", ""))))
        elif name == "join":
            self._check_join(value, str(argument(0, "d", "")))
        elif name == "indent":
            width = argument(0, "width", 4)
            width = len(width) if isinstance(width, str) else width
            check((len(str(value).splitlines()) + 1) * (width if isinstance(width, int) else 0) + len(str(value)))
        elif name == "center":
            check(argument(0, "width", 80) if isinstance(argument(0, "width", 80), int) else 0)
        elif name == "format":
            self._check_percent(str(value), kwargs or args)
        elif name == "trim":
            chars = argument(0, "chars", None)
            if isinstance(chars, str) and len(chars) * len(str(value)) > MAX_WORK:
                raise LimitExceeded(f"compares {len(chars)} x {len(str(value))} characters in 'trim'")
        elif name in ("round", "batch", "slice"):
            most = 100 if name == "round" else 10**5
            for number in (*args, *kwargs.values()):
                if isinstance(number, (int, float)) and abs(number) > most:
                    raise LimitExceeded(f"gives {name!r} a number above {most}")
        elif name == "tojson":
            for arg in (*args[1:], *kwargs.values()):
                width = (
                    arg
                    if isinstance(arg, int)
                    else max(map(len, arg), default=0)
                    if isinstance(arg, (tuple, list))
                    else 0
                )
                if width > 16 or (isinstance(arg, str) and len(arg) > 16):
                    raise LimitExceeded("indents or separates JSON by more than 16 characters")

    def _sum(self, value: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        items = value if attribute is None else map(make_attrgetter(self, attribute), value)
        for item in self.budget.ticking(items):
            start = self.budget.admit(start + item)
        return start

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it is, without the HTML escapes of jinja's own filter; the signature is transformers'."""
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _has_width(form: str) -> bool:
    return re.search(r"%[^a-zA-Z%]*\d", form) is not None


def _replaced_length(text: str, old: str, new: str) -> int:
    if not old:
        return len(text) + (len(text) + 1) * len(new)
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _escaped(value: Any) -> str:
    return str(escape(str(value)))


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(str(message)[:1000])


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"%[^a-zA-Z%]*\d", format):
        raise SecurityError("strftime_now takes a plain format of at most 256 characters")
    return datetime.now().strftime(format)


def render_bounded(
    environment: MeteredEnvironment, template: Any, variables: Mapping[str, Any], budget: Budget, max_output: int
) -> str:
    """Render under a budget, piece by piece, so that an output without end is stopped where it passes ``max_output``."""
    environment.budget = budget
    for value in variables.values():
        budget.check(budget.weigh(value))
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > max_output:
            raise LimitExceeded(f"writes more than {max_output} characters")
        budget.tick()
        pieces.append(piece)
    return "".join(pieces)
