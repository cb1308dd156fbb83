"""The pictures: nothing a model says gets out of its place, nothing is lost, and large graphs stay small pages."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lang.draw import MAX_DRAWN, MAX_TEXT, to_dot, to_html
from lang.graph import ProgramGraph
from lang.layout import HEIGHT, WIDTH, Box, fold, layout
from radixrt.engine.nodes import Choosing, Done, Failed, Fork, Gen, Join, Node, Output, Ref, Role, Select, Text, Usage

VOID = {"meta", "link", "br", "input", "img", "hr"}


class Page(HTMLParser):
    """What a browser would find: tags, attributes, text by tag; closing tags must fit."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            (self.scripts if self.open[-1] == "script" else self.styles).append(data)
        else:
            self.text += data

    def all(self, tag: str, cls: str = "") -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag and cls in [*(attrs.get("class") or "").split(), ""]]


def graph_of(*nodes: Node, said: dict[int, str] | None = None) -> ProgramGraph:
    graph = ProgramGraph("p", nodes={node.id: node for node in nodes})
    for node in nodes:
        graph.lines[node.id] = f"p.py:{node.id}"
        if isinstance(node, (Gen, Select)):
            graph.names[node.id] = node.name
    for id, text in (said or {}).items():
        usage = Usage(12, 8, 4, 3, started=0.1 * id, queue_time=0.01, prefill_time=0.02, decode_time=0.1 * id)
        graph.done[id] = Done(id, (Output(text),), usage)
    return graph


def forked() -> ProgramGraph:
    """Roles and a text, two branches, and what joins them."""
    return graph_of(
        Role(id=0, role="user", begin=True),
        Text(id=1, parent=0, parts=("Which way?",)),
        Role(id=2, parent=1, role="user", begin=False),
        Fork(id=3, parent=2, count=2),
        Text(id=4, parent=3, parts=("Left: ",)),
        Gen(id=5, parent=4, name="left"),
        Role(id=6, parent=5, role="assistant", begin=False),
        Gen(id=7, parent=3, name="right"),
        Join(id=8, parent=3, branches=(6, 7)),
        Text(id=9, parent=8, parts=("Of ", Ref(5), " and ", Ref(7), ": ")),
        Select(id=10, parent=9, name="best", choices=(("a",), ("b",))),
        Text(id=11, parent=10, parts=(" end",)),
        said={5: "to the left", 7: "to the right", 10: "b"},
    )


def test_folds_texts_and_roles_into_the_generation_they_lead_to() -> None:
    boxes = fold(forked())
    assert [(box.nodes, box.main, box.parent, box.named) for box in boxes] == [
        ([0, 1, 2, 3], 3, None, []),
        ([4, 5, 6], 5, 0, []),
        ([7], 7, 0, []),
        ([8, 9, 10], 10, 0, [1, 2]),
        ([11], 11, 3, []),
    ]
    assert boxes[0].children == [1, 2, 3]


@st.composite
def trees(draw: st.DrawFn) -> ProgramGraph:
    nodes: list[Node] = []
    for id in range(draw(st.integers(1, 25))):
        parent = draw(st.none() | st.integers(0, id - 1)) if id else None
        refs = tuple(Ref(draw(st.integers(0, id - 1))) for _ in range(draw(st.integers(0, 2)))) if id else ()
        kind = draw(st.sampled_from(["text", "gen", "role", "fork", "join"]))
        made: dict[str, Node] = {
            "text": Text(id=id, parent=parent, parts=("t", *refs)),
            "gen": Gen(id=id, parent=parent, name=f"g{id}"),
            "role": Role(id=id, parent=parent, role="user", begin=True),
            "fork": Fork(id=id, parent=parent, count=2),
            "join": Join(id=id, parent=parent, branches=tuple(ref.node for ref in refs)),
        }
        nodes.append(made[kind])
    said = {node.id: "x" for node in nodes if isinstance(node, Gen) and draw(st.booleans())}
    return graph_of(*nodes, said=said)


@given(trees())
@settings(max_examples=150)
def test_any_graph_is_folded_whole_and_laid_out_without_overlap(graph: ProgramGraph) -> None:
    boxes = fold(graph)
    assert sorted(id for box in boxes for id in box.nodes) == sorted(graph.nodes)
    assert all(box.parent is None or box.parent < at for at, box in enumerate(boxes))
    places, routes, width, height = layout(boxes)
    rows: dict[float, list[float]] = {}
    for x, y in places:
        assert WIDTH / 2 <= x <= width - WIDTH / 2 and 0 <= y <= height - HEIGHT
        rows.setdefault(y, []).append(x)
    for row in rows.values():
        assert all(other - one >= WIDTH for one, other in pairwise(sorted(row)))
    for at, box in enumerate(boxes):
        if box.parent is not None:
            assert places[box.parent][1] < places[at][1]
            assert (box.parent, at, False) in routes
    page = Page(to_html(graph))
    assert len(page.all("a", "box")) == len(boxes) == len(page.all("details"))
    assert to_dot(graph).count("[label=") == len(boxes)


def test_trees_have_no_crossings_and_forks_stand_side_by_side_over_their_middle() -> None:
    boxes = [Box([0], 0)]
    for at in range(1, 31):
        boxes.append(Box([at], at, (at - 1) // 2))
        boxes[(at - 1) // 2].children.append(at)
    places, _, _, _ = layout(boxes)
    for at in range(15):
        left, right = places[2 * at + 1], places[2 * at + 2]
        assert left[1] == right[1] > places[at][1] and left[0] < places[at][0] < right[0]
    for first, last in ((1, 2), (3, 6), (7, 14), (15, 30)):
        row = [places[at][0] for at in range(first, last + 1)]
        assert row == sorted(row)


HOSTILE = [
    "</script><script>alert(1)</script>",
    "</style><style>*{display:none}</style>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'>",
    "</pre></details></body>",
    "<!-- ",
    "--> <![CDATA[ ]]>",
    "&lt;b&gt; &#x3c;b&#x3e;",
    "{{7*7}} ${x} `y`",
    '\\" \\l \\N -> x; } digraph {',
    "\x00\x08\x0b\x1b[31m\x7f\x85\x9f\r\n\r",
    "\u202eevil\u2066\u2069\u200f\u061c",
    "\ud800 \udfff \ufffe \U000e0041",
    "مرحبا שלום 日本語 🎉 é",
    "a" * 3000,
]


def shape(page: Page) -> list[tuple[str, list[str]]]:
    """Tags and attributes, without the notes about what is cut."""
    return [(tag, sorted(attrs)) for tag, attrs in page.tags if tag != "em"]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_stay_texts(text: str) -> None:
    graph = graph_of(
        Text(id=0, parts=(text,)),
        Role(id=1, parent=0, role=text, begin=True),
        Gen(id=2, parent=1, name=text),
        Select(id=3, parent=2, name="s" + text, choices=((text,), ("other",)), method=text),
        Gen(id=4, parent=3, name="broken"),
        said={2: text, 3: text},
    )
    graph.name = text
    graph.lines = dict.fromkeys(graph.nodes, text)
    graph.failed[4] = Failed(4, text, text)
    plain = graph_of(*graph.nodes.values(), said={2: "x", 3: "x"})
    plain.failed[4] = Failed(4, "error", "x")
    plain.lines = dict.fromkeys(graph.nodes, "x")
    source = to_html(graph)
    source.encode()
    page, expected = Page(source), Page(to_html(plain))
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\u061c\ud800-\udfff]", source
    )
    assert shape(page) == shape(expected)
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    readable = text.replace("\r\n", "\n")
    if not re.search("[^\n -\x7e\u00a0-\u00ff]", readable):
        assert page.text.count(readable) >= 5  # text, name, output, choice, error: whole
    dot = to_dot(graph)
    dot.encode()
    statements = [line for line in dot.splitlines() if line.startswith("  b") and "[label=" in line]
    assert len(statements) == len(fold(graph))
    for line in statements:
        quoted = shlex.split(line.replace("\\l", "").replace("'", ""), posix=True)  # strings end where they should
        assert quoted[1].startswith("[label=") and quoted[-1].endswith("];")


def test_the_page_needs_nothing_from_outside_and_runs_only_its_own_script() -> None:
    source = to_html(forked())
    page = Page(source)
    assert not re.search(r"https?:|//[a-z]|\bimport\b|url\((?!#)", source)
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "srcset", "data", "action", "style"}]
    assert all((attrs.get("href") or "#").startswith("#") for _, attrs in page.tags)
    (policy,) = [attrs["content"] or "" for attrs in page.all("meta") if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    for content in (*page.scripts, *page.styles):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert len(page.scripts) == len(page.styles) == 1


def test_readable_without_script_and_for_everyone() -> None:
    page = Page(to_html(forked()))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        if (attrs.get("href") or "").startswith("#"):
            assert (attrs["href"] or "")[1:] in ids
        if "aria-labelledby" in attrs:
            assert attrs["aria-labelledby"] in ids
    for attrs in (*page.all("a", "box"), *page.all("a", "row")):
        assert attrs["aria-label"]
    for text in ("Which way?", "Left: ", "to the left", "to the right", "Of ", "p.py:10", "100.0%"):
        assert (text in page.text) == (text != "100.0%"), text
    assert [attrs["lang"] for attrs in page.all("html")] == ["en"]
    assert "prefers-color-scheme: dark" in page.styles[0]


def test_critical_path_figures_and_failures() -> None:
    graph = forked()
    graph.failed[10] = Failed(10, "error", "the lights went out")
    del graph.done[10]
    page = Page(to_html(graph))
    boxes = fold(graph)
    critical = set(graph.critical_path())
    hot = [f"#b{at}" for at, box in enumerate(boxes) if critical & set(box.nodes)]
    assert [attrs["href"] for attrs in page.all("a", "critical") if "box" in (attrs["class"] or "")] == hot
    assert hot == ["#b0", "#b2"]
    assert [attrs["href"] for attrs in page.all("a", "failed")] == ["#b3"]
    assert "the lights went out" in page.text
    assert "66.7%" in page.text  # 16 of 24 prompt tokens
    assert len(page.all("path", "named")) == 2
    assert len(page.all("a", "row")) == 2


def test_scores_of_a_choice() -> None:
    graph = graph_of(Select(id=0, name="s", choices=(("yes",), ("no",))), said={0: "no"})
    done = graph.done[0]
    scores = Choosing(1, (-2.5, float("-inf")), (0.0, 0.0), (0.25, 0.75), 0.75, ((1,), (2,)), ((0.0,), (0.0,)))
    graph.done[0] = Done(0, done.outputs, done.usage, scores)
    text = Page(to_html(graph)).text
    assert "-2.5" in text and "-inf" in text and "75.0%" in text


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 0.0, 1e-12, 1e12])
def test_odd_times(seconds: float) -> None:
    graph = graph_of(Text(id=0, parts=("x",)), Gen(id=1, parent=0, name="g"))
    usage = Usage(5, 3, 2, 1, started=seconds, queue_time=seconds, prefill_time=seconds, decode_time=seconds)
    graph.done[1] = Done(1, (Output("y"),), usage)
    graph.seconds = seconds
    source = to_html(graph)
    Page(source)
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', source)
    to_dot(graph)


def test_a_long_text_is_cut_with_a_note() -> None:
    text = "begin " + "x" * 1_000_000 + " end"
    source = to_html(graph_of(Text(id=0, parts=(text,)), Gen(id=1, parent=0, name="g"), said={1: text}))
    assert len(source) < 4 * MAX_TEXT
    page = Page(source)
    assert page.text.count(f"{len(text) - MAX_TEXT:,} of {len(text):,} characters left out") == 2
    assert page.text.count("xxx end") == 2


def test_large_graphs_stay_usable() -> None:
    nodes: list[Node] = [Text(id=0, parts=("begin " * 2000,))]
    at = 0
    while len(nodes) < 2000:
        fork = len(nodes)
        nodes.append(Fork(id=fork, parent=at, count=9))
        nodes += [Gen(id=fork + i, parent=fork, name=f"way{fork + i}") for i in range(1, 10)]
        at = len(nodes)
        nodes.append(Text(id=at, parent=fork, parts=("Now ", *(Ref(fork + i) for i in range(1, 10)))))
    graph = graph_of(*nodes, said={node.id: "word " * 2000 for node in nodes if isinstance(node, Gen)})
    source = to_html(graph)
    page = Page(source)
    boxes = fold(graph)
    assert len(page.all("a", "box")) == MAX_DRAWN < len(boxes) == len(page.all("details"))
    assert f"Only the first {MAX_DRAWN:,} of {len(boxes):,} boxes are drawn." in page.text
    assert len(source) < 30_000_000


def test_long_chains() -> None:
    nodes: list[Node] = [Text(id=0, parts=("x",))]
    nodes += [
        Gen(id=i, parent=i - 1, name="g") if i % 2 else Text(id=i, parent=i - 1, parts=("y",)) for i in range(1, 6001)
    ]
    Page(to_html(graph_of(*nodes)))
    assert to_dot(graph_of(*nodes)).count("->") == 3000


def test_nothing_and_not_run() -> None:
    assert "The graph is empty" in Page(to_html(ProgramGraph())).text
    graph = forked()
    graph.done.clear()
    page = Page(to_html(graph))
    assert "did not run" in page.text
    assert not page.all("svg", "gantt") and not page.all("a", "critical")


def test_dot() -> None:
    lines = [line.strip() for line in to_dot(forked()).splitlines()]
    assert lines[0] == 'digraph "p" {' and lines[-1] == "}"
    edges = sorted(line.rstrip(";") for line in lines if "->" in line)
    assert edges == [
        "b0 -> b1",
        "b0 -> b2",
        "b0 -> b3",
        "b1 -> b3 [style=dashed, constraint=true]",
        "b2 -> b3 [style=dashed, constraint=true]",
        "b3 -> b4",
    ]
    (left,) = [line for line in lines if line.startswith("b1 [")]
    assert 'label="left\\lLeft:\\lto the left\\l8 cached · 4 computed · 3 out, 530 ms\\l"' in left
    assert json.dumps("penwidth=2.5")[1:-1] in next(line for line in lines if line.startswith("b2 ["))


def test_methods_of_the_graph(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    graph = forked()
    assert graph.to_dot() == to_dot(graph)
    assert graph.to_html(tmp_path / "run.html").read_text(encoding="utf-8") == to_html(graph)
