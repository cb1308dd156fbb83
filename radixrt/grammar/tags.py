"""Structural tags as a grammar: free text that holds no trigger, tags where a trigger is complete.

Free text is followed by the automaton of Aho and Corasick ("Efficient string matching", 1975) over the triggers' bytes,
multiplied with the one of UTF-8, each state a right-linear rule. A state in which a trigger is complete offers the rest of
the tags instead of more text. Invariant: a text of the language splits in one way only into free text and tags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from radixrt.errors import InvalidRequest
from radixrt.grammar import ir

# UTF-8 (RFC 3629) as a byte automaton: state -> (low byte, high byte, next state); state 0 is between characters.
_UTF8: tuple[tuple[tuple[int, int, int], ...], ...] = (
    (
        (0x00, 0x7F, 0),
        (0xC2, 0xDF, 1),
        (0xE0, 0xE0, 4),
        (0xE1, 0xEC, 2),
        (0xED, 0xED, 5),
        (0xEE, 0xEF, 2),
        (0xF0, 0xF0, 6),
        (0xF1, 0xF3, 3),
        (0xF4, 0xF4, 7),
    ),
    ((0x80, 0xBF, 0),),
    ((0x80, 0xBF, 1),),
    ((0x80, 0xBF, 2),),
    ((0xA0, 0xBF, 1),),
    ((0x80, 0x9F, 1),),
    ((0x90, 0xBF, 2),),
    ((0x80, 0x8F, 2),),
)


@dataclass(frozen=True)
class _Triggers:
    """The automaton: ``edges[s]`` leads from state ``s`` by byte, missing bytes to state 0; ``complete[s]``: triggers that end there."""

    edges: tuple[Mapping[int, int], ...]
    complete: tuple[tuple[bytes, ...], ...]
    reachable: frozenset[int]  # without going on from a state in which a trigger is complete

    @property
    def fired(self) -> frozenset[bytes]:
        """The triggers that can ever be the first to be complete."""
        return frozenset(word for state in self.reachable for word in self.complete[state])


def _triggers(words: Iterable[str]) -> _Triggers:
    children: list[dict[int, int]] = [{}]
    complete: list[tuple[bytes, ...]] = [()]
    for word in sorted({word.encode() for word in words}):
        state = 0
        for byte in word:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                complete.append(())
            state = children[state][byte]
        complete[state] = (word,)
    edges: list[dict[int, int]] = [children[0]] + [{}] * (len(children) - 1)
    fallback = [0] * len(children)
    queue = deque(children[0].values())
    while queue:  # breadth first: the fallback of a state, shorter than it, is finished before it
        state = queue.popleft()
        complete[state] += complete[fallback[state]]
        for byte, child in children[state].items():
            fallback[child] = edges[fallback[state]].get(byte, 0)
            queue.append(child)
        edges[state] = {**edges[fallback[state]], **children[state]}
    reachable = {0}
    open_states = [0]
    while open_states:
        state = open_states.pop()
        if not complete[state]:
            new = set(edges[state].values()) - reachable
            reachable |= new
            open_states += new
    return _Triggers(tuple(edges), tuple(complete), frozenset(reachable))


def check_tags(begins: Sequence[str], triggers: Sequence[str]) -> None:
    """Every tag can be reached by a trigger, and every trigger leads to a tag.

    Raises:
        InvalidRequest: naming the tag or the trigger.
    """
    fired = sorted(word.decode() for word in _triggers(triggers).fired)
    for i, begin in enumerate(begins):
        if any(begin.startswith(word) for word in fired):
            continue
        own = [word for word in triggers if begin.startswith(word)]
        if own:
            inner = next(word for word in triggers if word != own[0] and word in own[0])
            why = f"its trigger {own[0]!r} contains the trigger {inner!r}, which is complete first"
        else:
            why = f"no trigger is the beginning of it; triggers are {', '.join(map(repr, triggers))}"
        raise InvalidRequest(f"structural_tags[{i}].begin", f"={begin!r} can never be written: {why}")
    for word in triggers:
        if not any(begin.startswith(word) for begin in begins):
            raise InvalidRequest("triggers", f"={word!r}: no tag begins with it, so that nothing could follow it")


def tags_to_ir(
    tags: Sequence[tuple[str, str, str]], triggers: Sequence[str], *, at_least_one: bool, stop_after_first: bool
) -> ir.Grammar:
    """The grammar of free text with tags, each ``(begin, rule of the content, end)``. The content rules are left to the caller."""
    automaton = _triggers(triggers)
    rules: dict[str, ir.Expr] = {}
    again = not stop_after_first
    after = ir.Ref("more0.0") if again else ir.EMPTY
    if again and not at_least_one:  # the text before the first tag is like that after it
        _add_text("more", automaton, True, rules)
        start = "more0.0"
    else:
        _add_text("text", automaton, not at_least_one, rules)
        start = "text0.0"
        if again:
            _add_text("more", automaton, True, rules)
    for state in sorted(automaton.reachable):
        if automaton.complete[state]:
            rules[f"tag{state}"] = ir.Alt(
                tuple(
                    ir.Seq((ir.Bytes(begin.encode()[len(word) :]), ir.Ref(content), ir.Bytes(end.encode()), after))
                    for word in automaton.complete[state]
                    for begin, content, end in tags
                    if begin.encode().startswith(word)
                )
            )
    return ir.Grammar(rules, start)


def _add_text(name: str, automaton: _Triggers, may_end: bool, rules: dict[str, ir.Expr]) -> None:
    """Rules ``{name}{trigger state}.{UTF-8 state}`` of free text up to and with the tag that interrupts it."""
    todo = [(0, 0)]
    seen = {(0, 0)}
    while todo:
        state, within = todo.pop()
        edges = automaton.edges[state]
        targets: dict[tuple[int, int], int] = {}
        for low, high, then in _UTF8[within]:
            plain = ((1 << (high + 1)) - 1) & ~((1 << low) - 1)
            for byte, to in edges.items():
                if low <= byte <= high:
                    plain &= ~(1 << byte)
                    targets[to, then] = targets.get((to, then), 0) | 1 << byte
            if plain:
                targets[0, then] = targets.get((0, then), 0) | plain
        items: list[ir.Expr] = [ir.EMPTY] if may_end and within == 0 else []
        for (to, then), bits in sorted(targets.items()):
            if automaton.complete[to]:
                items.append(ir.Seq((ir.ByteSet(bits), ir.Ref(f"tag{to}"))))
                continue
            items.append(ir.Seq((ir.ByteSet(bits), ir.Ref(f"{name}{to}.{then}"))))
            if (to, then) not in seen:
                seen.add((to, then))
                todo.append((to, then))
        rules[f"{name}{state}.{within}"] = ir.Alt(tuple(items))
