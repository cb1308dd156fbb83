"""Owns the seeded workloads: requests as token ids, and which request continues the output of which.

Invariants: the same name, seed, scale and tokenizer give the same token ids on every machine; a node comes after its
parent; no two requests have the same prompt; every request generates exactly ``max_tokens`` tokens (greedy, end of
sequence ignored), so all backends do the same amount of work.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from radixrt.errors import InvalidRequest, nearest

_MOST_ATTEMPTS = 1000  # to make a piece unlike the others

Tokens = tuple[int, ...]
Encode = Callable[[str], Sequence[int]]  # text -> token ids, without special tokens


@dataclass(frozen=True, slots=True)
class Node:
    """One request. Its prompt is ``tokens`` for a root, else the parent's prompt + the parent's output + ``tokens``."""

    id: str
    tokens: Tokens
    max_tokens: int
    parent: str | None = None


@dataclass(frozen=True)
class Workload:
    """Requests and their dependencies. ``concurrency``: most requests in flight at once; ``None``: all that are ready."""

    name: str
    about: str
    nodes: tuple[Node, ...]
    concurrency: int | None = None

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.parent is not None and node.parent not in seen:
                raise InvalidRequest("parent", f"={node.parent!r} of node {node.id!r}: must come before its child")
            if node.id in seen:
                raise InvalidRequest("id", f"={node.id!r}: two nodes of {self.name} have this id")
            if not node.tokens:
                raise InvalidRequest("tokens", f"node {node.id!r} must have at least one")
            seen.add(node.id)

    def stages(self) -> list[list[Node]]:
        """Nodes by depth: a stage needs only the outputs of the stages before it."""
        depth: dict[str, int] = {}
        stages: list[list[Node]] = []
        for node in self.nodes:
            depth[node.id] = 0 if node.parent is None else depth[node.parent] + 1
            if depth[node.id] == len(stages):
                stages.append([])
            stages[depth[node.id]].append(node)
        return stages

    def children(self) -> dict[str | None, list[Node]]:
        """Nodes by the id of their parent; the roots under ``None``."""
        found: dict[str | None, list[Node]] = {None: []}
        for node in self.nodes:
            found.setdefault(node.parent, []).append(node)
        return found

    def prompt(self, node: Node, prompts: Mapping[str, Tokens], outputs: Mapping[str, Tokens]) -> Tokens:
        """The prompt's token ids, given the prompts and outputs of the nodes that are done."""
        if node.parent is None:
            return node.tokens
        return prompts[node.parent] + outputs[node.parent] + node.tokens

    def prompt_lengths(self) -> dict[str, int]:
        """Prompt length of every node in tokens; known before anything runs."""
        lengths: dict[str, int] = {}
        by_id = {node.id: node for node in self.nodes}
        for node in self.nodes:
            before = 0 if node.parent is None else lengths[node.parent] + by_id[node.parent].max_tokens
            lengths[node.id] = before + len(node.tokens)
        return lengths

    @property
    def generated_tokens(self) -> int:
        return sum(node.max_tokens for node in self.nodes)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        lengths = self.prompt_lengths()
        return max(lengths[node.id] + node.max_tokens for node in self.nodes)


_SUBJECTS = (
    "the harbour master,a patient teacher,our night train,the old printer,a young surveyor,the village baker,my neighbour,"
    "the research ship,an honest clerk,the quiet orchestra,a retired pilot,the river ferry,the second committee,a stray goat,"
    "the lighthouse keeper,a careful chemist,the travelling library,our first customer,the mountain guide,a tired engineer"
)
_VERBS = (
    "repaired,measured,forgot,described,borrowed,painted,counted,delivered,questioned,carried,traded,examined,ignored,"
    "collected,translated,watched,divided,returned,sketched,inspected"
)
_OBJECTS = (
    "the copper kettle,three narrow bridges,a box of lemons,the winter schedule,every broken window,a map of the coast,"
    "the longest letter,two hundred chairs,the missing invoice,a basket of wool,the green bicycle,nine glass bottles,"
    "an unsigned contract,the northern well,a pair of boots,the autumn harvest,some faded photographs,the station clock,"
    "a bag of cement,the weather report"
)
_PLACES = (
    "near the market,behind the mill,before sunrise,without any help,on the last day of March,under heavy rain,"
    "for a very small fee,across the valley,after the long meeting,inside the old theatre,during the storm,at the border,"
    "with surprising care,along the canal,in front of everyone,because the road was closed,while the others slept,"
    "despite the cold,in exactly forty minutes,for the third time"
)


def sentences(rng: random.Random) -> Iterator[str]:
    """Endless varied English-like sentences, the same for the same generator state."""
    subjects, verbs, objects, places = (words.split(",") for words in (_SUBJECTS, _VERBS, _OBJECTS, _PLACES))
    while True:
        words = f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)} {rng.choice(places)}"
        if rng.random() < 0.3:
            words += f", and {rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}"
        yield f" {words[0].upper()}{words[1:]}."


class _Writer:
    """Writes pieces of exactly so many tokens; ``seed`` and ``name`` fix all of them."""

    def __init__(self, encode: Encode, name: str, seed: int) -> None:
        self._encode = encode
        self._rng = random.Random(f"radixrt/{name}/{seed}")

    def piece(self, count: int, start: str = "", end: str = "", *, unlike: set[Tokens] | None = None) -> Tokens:
        """``count`` tokens: ``start``, sentences, ``end``; not one of ``unlike``, to which the piece is added.

        ``start`` and ``end`` take at most a quarter of the piece each. Where a piece comes out like an earlier one,
        which only a very short one can, ``start`` goes and the sentences begin at a random token.
        """
        head, tail = (list(self._encode(text))[: count // 4] if text else [] for text in (start, end))
        for attempt in range(_MOST_ATTEMPTS):
            skip = self._rng.randrange(16) if attempt else 0
            made = [] if attempt else list(head)
            want = count - len(tail) + skip
            for sentence in sentences(self._rng):
                if len(made) >= want:
                    break
                made += self._encode(sentence)
            piece = tuple(made[skip:want] + tail)
            if unlike is None:
                return piece
            if piece not in unlike:
                unlike.add(piece)
                return piece
        raise InvalidRequest("scale", f"pieces of {count} tokens are too short to be told apart")


def _scaled(value: int, scale: float, low: int) -> int:
    return max(low, round(value * scale))


def few_shot(encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """48 questions under one few-shot prompt of 800 tokens, each with a tail of 20 tokens, 16 tokens out."""
    count, shared, tail, out = (
        _scaled(48, scale, 3),
        _scaled(800, scale, 16),
        _scaled(20, scale, 6),
        _scaled(16, scale, 4),
    )
    writer, seen = _Writer(encode, "few-shot", seed), set[Tokens]()
    examples = writer.piece(shared, "Answer each question with one short sentence.\n", "\n\n")
    nodes = tuple(
        Node(f"q{i}", examples + writer.piece(tail, f"Question {i + 1}:", "\nAnswer:", unlike=seen), out)
        for i in range(count)
    )
    return Workload("few-shot", f"{count} requests share {shared} tokens, {tail} of their own, {out} out", nodes)


def chat(encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """8 chats of 4 turns under one system prompt of 200 tokens; 50 tokens in and 64 out each turn."""
    chats, turns = _scaled(8, scale, 2), _scaled(4, min(scale, 1.0), 3)
    shared, own, out = _scaled(200, scale, 12), _scaled(50, scale, 8), _scaled(64, scale, 4)
    writer = _Writer(encode, "chat", seed)
    system = writer.piece(shared, "System: You are a helpful assistant.", "\n")
    nodes: list[Node] = []
    first = set[Tokens]()
    for turn in range(turns):
        for i in range(chats):
            said = writer.piece(own, "\nUser:", "\nAssistant:", unlike=None if turn else first)
            nodes.append(
                Node(f"c{i}t{turn}", said if turn else system + said, out, f"c{i}t{turn - 1}" if turn else None)
            )
    about = f"{chats} chats x {turns} turns, system prompt of {shared} tokens, {own} in and {out} out a turn"
    return Workload("chat", about, tuple(nodes))


def tree_of_thought(encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """4 problems x 27 requests (1 root, then 2, 4 and 2 children each) = 108; instructions of 300 tokens shared by all.

    A child's prompt is its parent's prompt, the parent's output and an instruction of 24 tokens; 24 tokens out.
    """
    problems, branching = _scaled(4, scale, 1), (2, 4, 2)
    shared, stated, step, out = (_scaled(n, scale, low) for n, low in ((300, 12), (60, 8), (24, 6), (24, 4)))
    writer, seen = _Writer(encode, "tree-of-thought", seed), set[Tokens]()
    rules = writer.piece(shared, "Solve the problem by thinking in small steps, then judge each step.", "\n\n")
    stage = [
        Node(f"p{i}", rules + writer.piece(stated, f"Problem {i + 1}:", "\nFirst thought:", unlike=seen), out)
        for i in range(problems)
    ]
    nodes = list(stage)
    for branches in branching:
        following: list[Node] = []
        for parent in stage:
            siblings = set[Tokens]()
            for k in range(branches):
                told = writer.piece(step, f"\nWay {k + 1}:", "\nThought:", unlike=siblings)
                following.append(Node(f"{parent.id}.{k}", told, out, parent.id))
        nodes += following
        stage = following
    about = f"{len(nodes)} requests: {problems} problems x (1 + 2 + 8 + 16), {shared} tokens shared by all, {step} in and {out} out a step"
    return Workload("tree-of-thought", about, tuple(nodes))


def unshared(encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """16 prompts of 200 tokens with nothing in common, 48 tokens out, 8 at a time."""
    count, own, out = _scaled(16, scale, 3), _scaled(200, scale, 12), _scaled(48, scale, 4)
    writer, seen = _Writer(encode, "unshared", seed), set[Tokens]()
    # A letter each, so that up to 26 prompts do not even share their first token.
    nodes = tuple(
        Node(f"u{i}", writer.piece(own, f"{string.ascii_uppercase[i % 26]}:", unlike=seen), out) for i in range(count)
    )
    at_once = _scaled(8, scale, 2)
    return Workload("unshared", f"{count} requests of {own} tokens, {out} out, {at_once} at a time", nodes, at_once)


def single_stream(encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """One request of 32 tokens, 128 out: the latency one reader sees."""
    own, out = _scaled(32, scale, 8), _scaled(128, scale, 8)
    return Workload(
        "single-stream",
        f"1 request of {own} tokens, {out} out",
        (Node("s0", _Writer(encode, "single-stream", seed).piece(own), out),),
        1,
    )


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "few-shot": few_shot,
    "chat": chat,
    "tree-of-thought": tree_of_thought,
    "unshared": unshared,
    "single-stream": single_stream,
}


def build(name: str, encode: Encode, *, scale: float = 1.0, seed: int = 0) -> Workload:
    """The workload of that name; ``scale`` shrinks or grows its counts and lengths (1.0: the published shape)."""
    if name not in WORKLOADS:
        raise InvalidRequest("workload", f"={name!r}: no such workload{nearest(name, WORKLOADS)}")
    if not 0.0 < scale <= 100.0:
        raise InvalidRequest("scale", f"={scale}: must be above 0 and at most 100")
    return WORKLOADS[name](encode, scale=scale, seed=seed)


def unique_edges(workload: Workload, prompts: Mapping[str, Tokens], outputs: Mapping[str, Tokens]) -> int:
    """Prompt tokens that any prefix cache must compute: the new edges of a trie, grown stage by stage.

    Deliberately naive (nested dicts, one token at a time), as an oracle for the engine's own count. A request leaves
    its prompt and its output but for the last token, which was sampled and never fed back.
    """
    trie: dict[int, dict] = {}

    def grow(tokens: Tokens) -> int:
        at, new = trie, 0
        for token in tokens:
            if token not in at:
                at[token], new = {}, new + 1
            at = at[token]
        return new

    total = 0
    for stage in workload.stages():
        total += sum(grow(prompts[node.id]) for node in stage)
        for node in stage:
            grow(prompts[node.id] + outputs[node.id][:-1])
    return total
