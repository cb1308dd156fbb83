"""Compiled: a program whose steps need no generated value is known before it runs, and goes to the engine in one submission."""

from __future__ import annotations

from typing import Any

from lang import ProgramState, function, gen, select


@function
def describe(s: ProgramState, animal: str) -> None:
    s += f"Here is what a {animal} is like.\n"
    branches = s.fork(2)
    branches += ["It looks", "It lives"]
    branches += gen("fact", max_tokens=12, stop=[".", "\n"])
    branches.join()
    s += f"It looks{s['fact'][0]}. It lives{s['fact'][1]}. It is a " + select("kind", ["mammal", "bird", "fish"])


def generated(state: ProgramState) -> list[Any]:
    """All generated tokens of a run, by node."""
    return [[output.token_ids for output in done.outputs] for _, done in sorted(state.graph.done.items())]


def main() -> None:
    traced = describe.trace()  # runs nothing
    print(f"known ahead: {len(traced.graph)} nodes, complete: {traced.complete}")
    for node in traced.graph:
        print(f"  {node.id}: {type(node).__name__} {traced.graph.text_of(node.id)!r}")

    live = describe.run("penguin", temperature=0)
    compiled = describe.compile().run("penguin", temperature=0)
    print(compiled.text())
    print(f"the same tokens as live: {generated(compiled) == generated(live)}")


if __name__ == "__main__":
    main()
