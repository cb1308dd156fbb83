"""A matcher and a sampler of grammars so simple that they are plainly right: what the front ends are tested with.

``accepts`` finds all places where an expression may end, by recursion; ``language`` lists all strings up to a length by
iteration, left recursion and all; ``sample`` draws a string at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from radixrt.grammar import ir
from radixrt.grammar.program import unpacked


def accepts(grammar: ir.Grammar, text: str | bytes) -> bool:
    """Whether the whole text is in the language. No left recursion."""
    data = text.encode() if isinstance(text, str) else text
    memo: dict[tuple[str, int], frozenset[int]] = {}

    def ends(expr: ir.Expr, at: int) -> frozenset[int]:
        match expr:
            case ir.Bytes(value):
                return frozenset([at + len(value)] if data.startswith(value, at) else [])
            case ir.ByteSet(bits):
                return frozenset([at + 1] if at < len(data) and bits >> data[at] & 1 else [])
            case ir.Ref(name):
                if (name, at) not in memo:
                    memo[name, at] = ends(grammar.rules[name], at)
                return memo[name, at]
            case ir.Alt(items):
                return frozenset().union(*(ends(item, at) for item in items))
            case ir.Seq(items):
                places = frozenset([at])
                for item in items:
                    places = frozenset().union(*(ends(item, place) for place in places))
                return places
            case ir.Repeat(item, low, high):
                found: set[int] = set()
                now, count, seen = frozenset([at]), 0, set[tuple[int, frozenset[int]]]()
                while now and (min(count, low), now) not in seen:
                    seen.add((min(count, low), now))
                    found |= now if count >= low else set()
                    if count == high:
                        break
                    now, count = frozenset().union(*(ends(item, place) for place in now)), count + 1
                return frozenset(found)
            case ir.Dfa(edges, accepting):
                state: int | None = 0
                found = {at} if 0 in accepting else set()
                for place in range(at, len(data)):
                    state = next((to for low, high, to in edges[state] if low <= data[place] <= high), None)
                    if state is None:
                        break
                    if state in accepting:
                        found.add(place + 1)
                return frozenset(found)
            case ir.PackedDfa():
                return ends(unpacked(expr), at)
        raise AssertionError(f"no rule for {expr}")

    return len(data) in ends(ir.Ref(grammar.start), 0)


def language(rules: Mapping[str, ir.Expr], length: int) -> dict[str, frozenset[bytes]]:
    """For every rule, its strings of at most ``length`` bytes."""
    known: dict[str, frozenset[bytes]] = {name: frozenset() for name in rules}

    def join(first: set[bytes], second: set[bytes]) -> set[bytes]:
        return {a + b for a in first for b in second if len(a) + len(b) <= length}

    def strings(expr: ir.Expr) -> set[bytes]:
        match expr:
            case ir.Bytes(value):
                return {value}
            case ir.ByteSet(bits):
                return {bytes([byte]) for byte in range(256) if bits >> byte & 1}
            case ir.Ref(name):
                return set(known[name])
            case ir.Alt(items):
                return set().union(*map(strings, items))
            case ir.Seq(items):
                found = {b""}
                for item in items:
                    found = join(found, strings(item))
                return found
            case ir.Repeat(item, low, high):
                once, now = strings(item), {b""}
                found = set(now) if low == 0 else set()
                for count in range(1, 1 + (low + length if high is None else high)):
                    now = join(now, once)
                    found |= now if count >= low else set()
                return found
        raise AssertionError(f"no rule for {expr}")

    while True:
        new = {name: known[name] | {s for s in strings(expr) if len(s) <= length} for name, expr in rules.items()}
        if new == known:
            return known
        known = new


def sample(grammar: ir.Grammar, rng: random.Random, steps: int = 60) -> bytes:
    """A random string of the language; after ``steps`` choices only the shortest ways are taken."""
    heights: dict[str, float] = dict.fromkeys(grammar.rules, float("inf"))

    def height(expr: ir.Expr) -> float:
        match expr:
            case ir.Ref(name):
                return heights[name] + 1
            case ir.Alt(items):
                return min(map(height, items), default=float("inf"))
            case ir.Seq(items):
                return max(map(height, items), default=0)
            case ir.Repeat(item, low, _):
                return height(item) if low else 0
        return 0

    while (new := {name: height(expr) for name, expr in grammar.rules.items()}) != heights:
        heights = new
    left = steps

    def draw(expr: ir.Expr) -> bytes:
        nonlocal left
        left -= 1
        match expr:
            case ir.Bytes(value):
                return value
            case ir.ByteSet(bits):
                return bytes([rng.choice([byte for byte in range(256) if bits >> byte & 1])])
            case ir.Ref(name):
                return draw(grammar.rules[name])
            case ir.Alt(items):
                possible = [item for item in items if height(item) < float("inf")]
                return draw(rng.choice(possible) if left > 0 else min(possible, key=height))
            case ir.Seq(items):
                return b"".join(map(draw, items))
            case ir.Repeat(item, low, high):
                more = rng.randint(0, 3) if left > 0 and height(item) < float("inf") else 0
                return b"".join(draw(item) for _ in range(min(low + more, low + more if high is None else high)))
            case ir.Dfa(edges, accepting):
                state, out = 0, bytearray()
                shortest = _distances(expr)
                while state not in accepting or (edges[state] and left > 0 and rng.random() < 0.7):
                    left -= 1
                    usable = [edge for edge in edges[state] if edge[2] in shortest]
                    if not usable:
                        break
                    low, high, state = rng.choice(usable) if left > 0 else min(usable, key=lambda e: shortest[e[2]])
                    out.append(rng.randint(low, high))
                return bytes(out)
            case ir.PackedDfa():
                return draw(unpacked(expr))
        raise AssertionError(f"no rule for {expr}")

    return draw(ir.Ref(grammar.start))


def _distances(dfa: ir.Dfa) -> dict[int, int]:
    """Steps from each state to a final one."""
    found = dict.fromkeys(dfa.accepting, 0)
    while True:
        new = dict(found)
        for state, out in enumerate(dfa.edges):
            ways = [found[to] + 1 for _, _, to in out if to in found]
            if ways and min(ways) < found.get(state, 1 << 30):
                new[state] = min(ways)
        if new == found:
            return found
        found = new


def mutated(data: bytes, rng: random.Random, alphabet: bytes) -> bytes:
    """The string with one to three bytes dropped, put in, changed or swapped."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(out))
        kind = rng.randrange(4)
        if kind == 0 and at < len(out):
            del out[at]
        elif kind == 1:
            out.insert(at, rng.choice(alphabet))
        elif kind == 2 and at < len(out):
            out[at] = rng.choice(alphabet)
        elif at + 1 < len(out):
            out[at], out[at + 1] = out[at + 1], out[at]
    return bytes(out)
