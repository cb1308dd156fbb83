"""The nodes of a request graph and what is told about them: plain data, with a JSON form that any client may speak.

A node continues the token state that its parent leaves (``parent=None``: nothing yet), so a fork is several nodes with one
parent. A text may name the outputs of other nodes (``Ref``) and, before it is bound, arguments (``Arg``).

JSON form, ``version`` 1: ``{"version": 1, "nodes": [{"id": 0, "kind": "text", "parent": null, "parts": ["Hi ", {"ref": 3}]}, ...]}``;
each node has ``id``, ``kind``, ``parent``, ``sample`` (which sample of the parent it continues, default 0) and the fields of its class. Fields with
default values may be left out. Parents and references come before the nodes that name them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeAlias, TypeVar

from radixrt.errors import InvalidRequest, shown, unknown_field
from radixrt.request import FinishReason, PositionLogprobs, SamplingParams
from radixrt.tools.definitions import read_tools
from radixrt.tools.parts import Answer

VERSION = 1
MAX_NODES = 1_000_000
_ID = 2**53
N = TypeVar("N", bound="Node")
F = TypeVar("F")


@dataclass(frozen=True, slots=True)
class Ref:
    """The text that another node generated or chose."""

    node: int
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of the program, to be bound before the graph runs."""

    name: str


Part: TypeAlias = str | Ref | Arg
Template: TypeAlias = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A step of a program. Ids are unique within it, and ascend."""

    kind: ClassVar[str] = ""
    id: int
    parent: int | None = None
    sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Text(Node):
    """Appends a text."""

    kind: ClassVar[str] = "text"
    parts: Template


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave. ``seconds``: that the program waited for it, from which the next wait is foretold."""

    id: str
    name: str
    arguments: str
    content: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Read:
    """How the text of a ``Gen`` is read: into thinking, what it says, and calls of the chat's tools.

    Fields:
        choice: ``auto``, ``none``, ``required`` or ``named``. tool: the one that must be called. parallel: more than one call may follow.
        reasoning: thinking is kept apart.
    """

    choice: str = "none"
    tool: str | None = None
    parallel: bool = True
    reasoning: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Role(Node):
    """Begins or ends a message of a chat, as the model's template writes it.

    Fields:
        tools: on a chat's first message: what the model may call in it, as ``name``, ``description`` and ``parameters``.
        results: ``assistant`` begins anew behind the results of the calls that its open message has made.
    """

    kind: ClassVar[str] = "role"
    role: str
    begin: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    results: tuple[ToolResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gen(Node):
    """Generates. ``heal``: token healing where the text before ends inside a word. ``read``: its outputs have an ``answer``."""

    kind: ClassVar[str] = "gen"
    params: SamplingParams = field(default_factory=SamplingParams)
    name: str = ""
    heal: bool = True
    read: Read | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Select(Node):
    """Appends one of several texts: the best by ``method`` or, above ``temperature`` 0, one sampled by their scores."""

    kind: ClassVar[str] = "select"
    choices: tuple[Template, ...]
    method: str = "token_length_normalized"
    temperature: float = 0.0
    seed: int | None = None
    name: str = ""
    heal: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Node):
    """Marks that ``count`` branches begin here; appends nothing."""

    kind: ClassVar[str] = "fork"
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Node):
    """Marks that the branches whose last nodes are ``branches`` end here; appends nothing and waits for none."""

    kind: ClassVar[str] = "join"
    branches: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Node):
    """Marks that the program waits for tools of these names before it goes on from here; appends nothing."""

    kind: ClassVar[str] = "wait"
    tools: tuple[str, ...] = ()


KINDS: dict[str, type[Node]] = {cls.kind: cls for cls in (Text, Role, Gen, Select, Fork, Join, Wait)}


# ---- what is told about nodes


@dataclass(frozen=True, slots=True)
class Usage:
    """What a node cost: tokens, and seconds. ``tokenized``: tokens that its new text was turned into for it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    tokenized: int = 0
    started: float = 0.0  # seconds after the program began
    queue_time: float = 0.0
    prefill_time: float = 0.0
    decode_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """One sample of a ``Gen``, or the choice of a ``Select``. ``answer``: its parts, where they were asked for."""

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: str | int | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    answer: Answer | None = None

    @property
    def content(self) -> str:
        """The text without thinking and calls, where these are read; else the text."""
        return self.text if self.answer is None else self.answer.content


@dataclass(frozen=True, slots=True)
class Choosing:
    """How a ``Select`` was decided; the tuples go by choice. ``logprobs``: total log-probability of each one's tokens."""

    index: int
    scores: tuple[float, ...]
    logprobs: tuple[float, ...]
    probabilities: tuple[float, ...]
    confidence: float
    tokens: tuple[tuple[int, ...], ...]
    token_logprobs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that a running node has added to one of its samples. ``content`` and ``reasoning``: what became certain of these, where it is read."""

    node: int
    sample: int
    text: str
    content: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """A ``Gen``, ``Select`` or ``Role`` is over; the output of a ``Role`` is the markup it wrote."""

    node: int
    outputs: tuple[Output, ...]
    usage: Usage
    choosing: Choosing | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A node ended without a result, and with it everything that needs it. ``kind``: ``invalid``, ``cancelled``, ``error`` or ``unsupported``."""

    node: int
    kind: str
    error: str


Event: TypeAlias = Delta | Done | Failed


# ---- JSON


def to_dict(node: Node) -> dict[str, Any]:
    """The JSON form of a node; fields that have their default value are left out."""
    data: dict[str, Any] = {"id": node.id, "kind": node.kind, "parent": node.parent}
    for item in fields(node):
        value = getattr(node, item.name)
        if item.name in ("id", "parent") or (item.default is not MISSING and value == item.default):
            continue
        if item.name == "parts":
            value = _parts_out(value)
        elif item.name == "choices":
            value = [_parts_out(choice) for choice in value]
        elif item.name == "params":
            value = params_to_dict(value)
        elif item.name == "tools" and isinstance(node, Role):
            value = [dict(tool) for tool in value]
        elif item.name in ("results", "read"):
            value = [asdict(one) for one in value] if isinstance(value, tuple) else asdict(value)
        data[item.name] = list(value) if isinstance(value, tuple) else value
    return data


def params_to_dict(params: SamplingParams) -> dict[str, Any]:
    """Fields that differ from their defaults, in JSON's types; ``SamplingParams.from_dict`` reads them."""
    plain = SamplingParams()
    data: dict[str, Any] = {}
    for item in fields(params):
        value = getattr(params, item.name)
        if value != getattr(plain, item.name):
            if item.name == "constraint":
                value = value.to_dict()
            elif isinstance(value, Mapping):
                value = {str(key): entry for key, entry in value.items()}
            elif isinstance(value, tuple):
                value = list(value)
            data[item.name] = value
    return data


def from_dict(data: Any, where: str = "node") -> Node:
    """The node of a JSON form.

    Raises:
        InvalidRequest: an unknown kind or field (with the nearest valid one), or a value of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise InvalidRequest(where, f"={shown(data)}: must be an object")
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise InvalidRequest(f"{where}.kind", f"={shown(kind)}: must be one of {', '.join(KINDS)}")
    cls = KINDS[kind]
    valid = {item.name: item for item in fields(cls)}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in valid:
            raise unknown_field(where, name, [*valid, "kind"])
        values[name] = _read(f"{where}.{name}", "names" if cls is Wait and name == "tools" else name, value)
    for name, item in valid.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise InvalidRequest(f"{where}.{name}", "is missing")
    return cls(**values)


def graph_to_dict(nodes: Iterable[Node]) -> dict[str, Any]:
    return {"version": VERSION, "nodes": [to_dict(node) for node in nodes]}


def graph_from_dict(data: Any) -> tuple[Node, ...]:
    """The nodes of a graph's JSON form, checked: each parent and reference is an earlier node.

    Raises:
        InvalidRequest: another version, a malformed node, an id that is taken or unknown.
    """
    if not isinstance(data, Mapping):
        raise InvalidRequest("graph", f"must be an object, not {type(data).__name__}")
    for name in data:
        if name not in ("version", "nodes"):
            raise unknown_field("graph", str(name), ["version", "nodes"])
    if data.get("version") != VERSION:
        raise InvalidRequest("graph.version", f"={shown(data.get('version'))}: this runtime reads version {VERSION}")
    listed = data.get("nodes")
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
        raise InvalidRequest("graph.nodes", "must be a list of nodes")
    if len(listed) > MAX_NODES:
        raise InvalidRequest("graph.nodes", f"has {len(listed):,} nodes: at most {MAX_NODES:,} are taken")
    nodes = tuple(from_dict(item, f"nodes[{i}]") for i, item in enumerate(listed))
    check_order(nodes, {})
    return nodes


def check_order(nodes: Iterable[Node], known: Mapping[int, object]) -> None:
    """Raises InvalidRequest where a node's id is taken, or its parent or a reference is no earlier node."""
    seen: set[int] = set()
    for node in nodes:
        where = f"node {node.id}"
        if node.id in seen or node.id in known:
            raise InvalidRequest(where, ": its id is taken")
        needs = [node.parent] if node.parent is not None else []
        needs += [ref.node for ref in refs(node)]
        if isinstance(node, Join):
            needs += node.branches
        for other in needs:
            if other not in seen and other not in known:
                raise InvalidRequest(where, f": needs node {other}, which is not an earlier node of this program")
        seen.add(node.id)


def refs(node: Node) -> list[Ref]:
    """The outputs that a node's texts name."""
    if isinstance(node, Text):
        return [part for part in node.parts if isinstance(part, Ref)]
    if isinstance(node, Select):
        return [part for choice in node.choices for part in choice if isinstance(part, Ref)]
    return []


def _parts_out(parts: Template) -> list[Any]:
    out: list[Any] = []
    for part in parts:
        if isinstance(part, Ref):
            out.append({"ref": part.node, "sample": part.sample} if part.sample else {"ref": part.node})
        else:
            out.append({"arg": part.name} if isinstance(part, Arg) else part)
    return out


def _read(where: str, name: str, value: Any) -> Any:
    if name == "parent" and value is None:
        return None
    if name == "seed" and value is None:
        return None
    if name in ("id", "parent", "sample", "count", "seed"):
        low = -(2**63) if name == "seed" else 0
        high = 2**64 if name == "seed" else _ID
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < high:
            raise InvalidRequest(where, f"={shown(value)}: must be an integer of at least {low}")
        return value
    if name in ("begin", "heal"):
        if not isinstance(value, bool):
            raise InvalidRequest(where, f"={shown(value)}: must be true or false")
        return value
    if name in ("role", "name", "method"):
        if not isinstance(value, str):
            raise InvalidRequest(where, f"={shown(value)}: must be a string")
        return value
    if name == "temperature":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise InvalidRequest(where, f"={shown(value)}: must be a number from 0 to 100")
        return float(value)
    if name == "parts":
        return _parts_in(where, value)
    if name == "choices":
        return tuple(_parts_in(f"{where}[{i}]", item) for i, item in enumerate(_listed(where, value)))
    if name == "names":
        return tuple(_read(f"{where}[{i}]", "name", item) for i, item in enumerate(_listed(where, value)))
    if name == "tools":
        read_tools(where, [{"type": "function", "function": tool} for tool in _listed(where, value)])
        return tuple(value)
    if name == "results":
        return tuple(_fields(f"{where}[{i}]", ToolResult, item) for i, item in enumerate(_listed(where, value)))
    if name == "read":
        return None if value is None else _fields(where, Read, value)
    if name == "branches":
        return tuple(_read(f"{where}[{i}]", "id", item) for i, item in enumerate(_listed(where, value)))
    assert name == "params", name
    if isinstance(value, Mapping) and isinstance(value.get("logit_bias"), Mapping):
        value = {**value, "logit_bias": {_token(where, key): bias for key, bias in value["logit_bias"].items()}}
    return SamplingParams.from_dict(value)


def _fields(where: str, cls: type[F], value: Any) -> F:
    """A small record of texts, flags and seconds."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(where, f"={shown(value)}: must be an object")
    known = {item.name: item for item in fields(cls)}  # type: ignore[arg-type]
    for name, given in value.items():
        if name not in known:
            raise unknown_field(where, str(name), list(known))
        kind = str(known[name].type)
        number = kind == "float" and isinstance(given, int | float) and not isinstance(given, bool) and given >= 0
        text = kind.startswith("str") and (isinstance(given, str) or (given is None and "None" in kind))
        if not (number or text or (kind == "bool" and isinstance(given, bool))):
            wanted = {"float": "a number of seconds", "bool": "true or false"}.get(kind, "a string")
            raise InvalidRequest(f"{where}.{name}", f"={shown(given)}: must be {wanted}")
    for name, item in known.items():
        if name not in value and item.default is MISSING:
            raise InvalidRequest(f"{where}.{name}", "is missing")
    return cls(**value)


def _token(where: str, key: Any) -> int:
    try:
        return int(key)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{where}.logit_bias", f" has the key {shown(key)}: must be a token id") from None


def _listed(where: str, value: Any) -> Sequence[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidRequest(where, f"={shown(value)}: must be a list")
    return value


def _parts_in(where: str, value: Any) -> Template:
    parts: list[Part] = []
    for i, item in enumerate([value] if isinstance(value, str) else _listed(where, value)):
        if isinstance(item, str):
            parts.append(item)
        elif isinstance(item, Mapping) and item.keys() <= {"ref", "sample"} and "ref" in item:
            parts.append(Ref(_read(f"{where}[{i}]", "id", item["ref"]), _read(where, "sample", item.get("sample", 0))))
        elif isinstance(item, Mapping) and item.keys() == {"arg"} and isinstance(item["arg"], str):
            parts.append(Arg(item["arg"]))
        else:
            raise InvalidRequest(f"{where}[{i}]", f'={shown(item)}: must be text, {{"ref": node}} or {{"arg": name}}')
    return tuple(parts)
