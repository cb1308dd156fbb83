"""Pictures of a program's graph: Graphviz' language, and one self-contained page.

Invariants: nothing here runs or changes a graph; every text of a program or a model is cleaned and escaped on its way out, and none of it reaches
a script; the page needs no network, and without its script it is still a readable list.
"""

from __future__ import annotations

import hashlib
import html
import math
import re
import unicodedata
from base64 import b64encode
from collections.abc import Sequence
from itertools import pairwise

from lang.graph import ProgramGraph
from lang.layout import HEIGHT, WIDTH, Box, fold, layout
from lang.page import SCRIPT, STYLE
from radixrt.engine.nodes import Arg, Done, Failed, Fork, Gen, Join, Ref, Role, Select, Text, Wait, params_to_dict

MAX_DRAWN = 300  # boxes in the drawing
MAX_ROWS = 300  # of the timeline
MAX_LISTED = 5_000  # boxes in the list
MAX_TEXT = 20_000  # characters of one text
MAX_TEXTS = 6_000_000  # characters of all texts, about

_NARROW, _WIDE = frozenset("iIjlft.,:;'|!()[] "), frozenset("mwMWDGHNOQU@%<>=+~_&#")
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff\U000e0000-\U000e007f]"
)


def to_dot(graph: ProgramGraph) -> str:
    """The graph in Graphviz' language: a box for each generation, dashed edges for outputs that are named, the critical path bold."""
    boxes, critical = fold(graph), _critical(graph)
    lines = [
        f"digraph {_quoted(graph.name or 'program')} {{",
        '  node [shape=box, style=rounded, fontname="sans-serif", fontsize=11];',
        '  edge [color="#888888"];',
    ]
    for at, box in enumerate(boxes):
        shown = [_title(graph, box), *(_snippet(text, 40) for text in (_before(graph, box), _after(graph, box)))]
        done = graph.done.get(box.main)
        if done is not None:
            shown.append(f"{_tokens(done)}, {_time(_cost(done))}")
        label = "\\l".join(_quoted(text)[1:-1] for text in shown if text) + "\\l"
        style = ', color="#7c3aed", penwidth=2.5' if not critical.isdisjoint(box.nodes) else ""
        style = ', color="#c92a2a", penwidth=2' if _failure(graph, box) else style
        lines.append(f'  b{at} [label="{label}"{style}];')
        if box.parent is not None:
            lines.append(f"  b{box.parent} -> b{at};")
        lines += [f"  b{other} -> b{at} [style=dashed, constraint={str(other < at).lower()}];" for other in box.named]
    return "\n".join([*lines, "}"]) + "\n"


def to_html(graph: ProgramGraph) -> str:
    """The graph as one page: drawing, timeline, figures, and every text in a list. What is cut to keep the page usable, it says."""
    boxes = fold(graph)
    critical = _critical(graph)
    texts = len(graph) + sum(len(done.outputs) for done in graph.done.values())
    most = min(MAX_TEXT, max(400, MAX_TEXTS // max(texts, 1)))
    name = _text(graph.name or "program")
    policy = f"default-src 'none'; style-src {_digest(STYLE)}; script-src {_digest(SCRIPT)}; base-uri 'none'"
    listed = "\n".join(_details(graph, at, box, critical, most) for at, box in enumerate(boxes[:MAX_LISTED]))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name}: the run</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{STYLE}</style></head>
<body><a class="skip" href="#list">To the list of all steps</a>
<header><h1><bdi>{name}</bdi></h1><p class="quiet">seed {graph.seed}{_ran(graph)}</p></header>
<main>
{_figures(graph, boxes, critical)}
{_drawing(graph, boxes, critical)}
{_timeline(graph, boxes, critical)}
<section aria-labelledby="list"><h2 id="list">Every step</h2>
<p class="needs-script"><label>Show steps with <input id="filter" type="search" autocomplete="off" placeholder="a name or a text"></label>
<span id="found" role="status"></span></p>
{_cut(len(boxes), MAX_LISTED, "boxes are listed")}<div class="list">
{listed}
</div></section>
</main>
<script>{SCRIPT}</script>
</body></html>
"""


# ---- what boxes say


def _label(graph: ProgramGraph, node: int) -> str:
    """The name of a node for a person."""
    item = graph.nodes[node]
    name = graph.names.get(node) or (item.name if isinstance(item, (Gen, Select)) else "")
    return name or f"{item.kind} {node}"


def _title(graph: ProgramGraph, box: Box) -> str:
    branches = len(box.children)
    if isinstance(graph.nodes[box.main], (Gen, Select)):
        return _label(graph, box.main)
    return f"shared by {branches} branches" if branches > 1 else graph.nodes[box.main].kind


def _before(graph: ProgramGraph, box: Box) -> str:
    """The texts that lead to a box' generation, roles named."""
    said: list[str] = []
    for id in box.nodes:
        item = graph.nodes[id]
        if id == box.main and isinstance(item, (Gen, Select)):
            break
        if isinstance(item, Role) and item.begin:
            said.append(f"{item.role}: ")
        elif isinstance(item, Text):
            said.append(graph.text_of(id)[:2000])
    return "".join(said)


def _after(graph: ProgramGraph, box: Box) -> str:
    failed = _failure(graph, box)
    if failed is not None:
        return f"✕ {failed.error}"
    done = graph.done.get(box.main)
    if done is None or not isinstance(graph.nodes[box.main], (Gen, Select)):
        return ""
    more = f" (and {len(done.outputs) - 1} more)" if len(done.outputs) > 1 else ""
    return (done.outputs[0].text[:2000] if done.outputs else "") + more


def _failure(graph: ProgramGraph, box: Box) -> Failed | None:
    return next((graph.failed[id] for id in (box.main, *box.nodes) if id in graph.failed), None)


def _critical(graph: ProgramGraph) -> set[int]:
    return set(graph.critical_path()) if graph.done else set()


def _sane(seconds: float) -> float:
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _cost(done: Done) -> float:
    return _sane(done.usage.queue_time) + _sane(done.usage.prefill_time) + _sane(done.usage.decode_time)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def _tokens(done: Done) -> str:
    used = done.usage
    return f"{used.cached_tokens:,} cached · {used.computed_tokens:,} computed · {used.generated_tokens:,} out"


# ---- texts, made safe


def _clean(text: str) -> str:
    """``text`` with what cannot be seen, or hides what can, made visible: controls, direction marks, halves of characters."""

    def named(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"

    return _ODD.sub(named, text.replace("\r\n", "\n"))


def _text(text: str, most: int = MAX_TEXT) -> str:
    """``text`` for HTML, in content or a quoted attribute."""
    cut = html.escape(_clean(text[:most]))
    return cut if len(text) <= most else f"{cut}…"


def _long(text: str, most: int) -> str:
    if len(text) <= most:
        return _text(text, most)
    half = most // 2
    return (
        f'{_text(text[:half])}\n<em class="cut">… {len(text) - 2 * half:,} of {len(text):,} characters left out …</em>\n'
        f"{_text(text[-half:])}"
    )


def _snippet(text: str, columns: int = 32) -> str:
    """The first words of a text, on one line of so many columns."""
    return "".join(_wrapped(text, columns, 1))


def _wrapped(text: str, columns: int, most: int) -> list[str]:
    """The first words of a text, on at most so many lines."""
    words = " ".join(_clean(text[:2000]).split())
    lines: list[str] = []
    begin, room = 0, float(columns)
    for i, char in enumerate(words):
        wide = 0.6 if char in _NARROW else 1.3 if char in _WIDE else 1.0
        wide = 1.9 if unicodedata.east_asian_width(char) in "WF" else wide
        if room >= wide:
            room -= wide
            continue
        if len(lines) + 1 == most:
            return [*lines, words[begin : max(i - 1, begin + 1)].rstrip() + "…"]
        end = words.rfind(" ", begin, i + 1)
        end = end if end > begin else i
        lines.append(words[begin:end].strip())
        begin, room = end, columns - (i - end + 1)
    return [*lines, words[begin:].strip()] if words[begin:].strip() else lines


def _quoted(text: str) -> str:
    """A string of Graphviz' language. A backslash would begin an escape there."""
    return '"' + " ".join(_clean(text).split()).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _cut(count: int, most: int, what: str) -> str:
    return f'<p class="note">Only the first {most:,} of {count:,} {what}.</p>' if count > most else ""


# ---- the page's sections


def _ran(graph: ProgramGraph) -> str:
    nodes = f" · {len(graph):,} nodes"
    if graph.seconds is not None:
        return f"{nodes} · {_time(_sane(graph.seconds))}"
    return nodes if graph.done or graph.failed else f"{nodes} · did not run"


def _figures(graph: ProgramGraph, boxes: Sequence[Box], critical: set[int]) -> str:
    totals = graph.totals()
    costs = [(id, _cost(graph.done[id])) for id in sorted(critical) if id in graph.done]
    costs = [(id, cost) for id, cost in costs if isinstance(graph.nodes[id], (Gen, Select))]
    cards = [
        ("generations", f"{len(graph.generations()):,}"),
        ("cache hit rate", f"{graph.hit_rate:.1%}"),
        ("prompt tokens", f"{totals['prompt_tokens']:,}"),
        ("cached", f"{totals['cached_tokens']:,}"),
        ("computed", f"{totals['computed_tokens']:,}"),
        ("generated", f"{totals['generated_tokens']:,}"),
        ("critical path", _time(sum(cost for _, cost in costs))),
    ]
    if graph.failed:
        cards.append(("failed", f"{len(graph.failed):,}"))
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in cards)
    box_of = {id: at for at, box in enumerate(boxes) for id in box.nodes}
    steps = [f'<li>{_link(graph, id, box_of)} <span class="quiet">{_time(cost)}</span></li>' for id, cost in costs[:40]]
    more = f'<li class="quiet">and {len(costs) - 40:,} more</li>' if len(costs) > 40 else ""
    path = f'<h3>Critical path</h3><ol class="chain">{"".join(steps)}{more}</ol>' if steps else ""
    return f'<section aria-label="Totals"><dl class="cards">{shown}</dl>{path}</section>'


def _link(graph: ProgramGraph, node: int, box_of: dict[int, int]) -> str:
    return f'<a data-box href="#b{box_of[node]}"><bdi>{_text(_label(graph, node), 60)}</bdi></a>'


def _drawing(graph: ProgramGraph, boxes: Sequence[Box], critical: set[int]) -> str:
    drawn = boxes[:MAX_DRAWN]
    if not drawn:
        return '<p class="note">The graph is empty.</p>'
    places, routes, width, height = layout(drawn)
    hot = {at for at, box in enumerate(drawn) if not critical.isdisjoint(box.nodes)}
    chain = sorted(hot)
    hot_edges = set(pairwise(chain))
    usages = [graph.done[box.main].usage for box in boxes if box.main in graph.done]
    scale = max((used.cached_tokens + used.computed_tokens + used.generated_tokens for used in usages), default=1)
    lines: list[str] = []
    for (source, target, dashed), points in sorted(routes.items(), key=lambda item: item[0][:2] in hot_edges):
        kind = ("edge", "named" if dashed else "", "critical" if (source, target) in hot_edges else "")
        lines.append(f'<path class="{" ".join(filter(None, kind))}" d="{_curve(points)}"/>')
    shown = [_drawn_box(graph, at, box, places[at], at in hot, scale) for at, box in enumerate(drawn)]
    legend = "".join(
        f'<li><span class="key {kind}"></span>{name}</li>'
        for kind, name in (
            ("cached", "cached"),
            ("computed", "computed"),
            ("generated", "generated"),
            ("line", "continues"),
            ("line named", "names its output"),
            ("crit", "critical path"),
        )
    )
    return f"""<section aria-labelledby="drawing"><h2 id="drawing">Graph</h2>
<ul class="legend">{legend}<li class="needs-script"><button type="button" id="fit" aria-pressed="false">Fit</button></li></ul>
{_cut(len(boxes), MAX_DRAWN, "boxes are drawn")}<div class="split"><div class="canvas" tabindex="0" role="region" aria-label="Drawing of the graph">
<svg id="graph" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}" role="group" aria-label="Steps of the program, those that come first on top">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker>\
<marker id="tip-hot" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>
{chr(10).join(lines)}
{chr(10).join(shown)}
</svg></div><aside id="panel" class="needs-script" aria-live="polite" tabindex="-1"><p class="quiet">Choose a step to read all of it here.</p></aside></div></section>"""


def _drawn_box(graph: ProgramGraph, at: int, box: Box, place: tuple[float, float], hot: bool, scale: int) -> str:
    x, y = place[0] - WIDTH / 2, place[1]
    done, failed = graph.done.get(box.main), _failure(graph, box)
    title, before, after = _title(graph, box), _snippet(_before(graph, box)), _snippet(_after(graph, box))
    generates = isinstance(graph.nodes[box.main], (Gen, Select))
    classes = ["box", graph.nodes[box.main].kind, "critical" if hot else "", "failed" if failed else ""]
    said = [title, "on the critical path" if hot else "", "failed" if failed else "", before, after]
    body = [
        f'<text class="name" x="12" y="20">{_text(_snippet(title, 18 if generates and done is not None else 25))}</text>'
    ]
    if generates or failed:
        body.append(f'<text class="quiet" x="12" y="39">{_text(before)}</text>')
    else:
        for i, line in enumerate(_wrapped(_before(graph, box), 32, 3)):
            body.append(f'<text class="quiet" x="12" y="{39 + 18 * i}">{_text(line)}</text>')
    if failed:
        body.append(f'<text class="bad" x="12" y="57">{_text(after)}</text>')
    elif generates:
        body.append(f'<text x="12" y="57">{_text(after)}</text>')
    if generates and done is not None:
        said += [_tokens(done), _time(_cost(done))]
        body.append(f'<text class="quiet" x="{WIDTH - 12}" y="20" text-anchor="end">{_time(_cost(done))}</text>')
        body.append(f'<g transform="translate(12 66)">{_bar(done, scale, WIDTH - 24, 6)}</g>')
        body.append(f'<text class="small" x="12" y="85">{_tokens(done)}</text>')
    elif generates:
        body.append(f'<text class="small" x="12" y="85">{"failed" if failed else "did not run"}</text>')
    label = _text(", ".join(part for part in said if part), 300)
    return (
        f'<a class="{" ".join(filter(None, classes))}" data-box href="#b{at}" aria-label="{label}">'
        f'<svg x="{x:.1f}" y="{y:.1f}" width="{WIDTH}" height="{HEIGHT}"><rect x="1.5" y="1.5" width="{WIDTH - 3}" height="{HEIGHT - 3}" rx="8"/>'
        f"{''.join(body)}</svg></a>"
    )


def _bar(done: Done, scale: int, width: float, height: float) -> str:
    """Cached, computed and generated tokens, side by side; ``scale`` tokens are the whole width."""
    parts: list[str] = [f'<rect class="track" width="{width}" height="{height}" rx="1"/>']
    x = 0.0
    used = done.usage
    for kind, count in (
        ("cached", used.cached_tokens),
        ("computed", used.computed_tokens),
        ("generated", used.generated_tokens),
    ):
        wide = max(count, 0) / max(scale, 1) * width
        if wide:
            parts.append(f'<rect class="{kind}" x="{x:.2f}" width="{max(wide, 0.75):.2f}" height="{height}"/>')
        x += wide
    return "".join(parts)


def _timeline(graph: ProgramGraph, boxes: Sequence[Box], critical: set[int]) -> str:
    rows = [(at, box.main, graph.done[box.main]) for at, box in enumerate(boxes) if box.main in graph.done]
    rows = [row for row in rows if isinstance(graph.nodes[row[1]], (Gen, Select))]
    if not rows:
        return ""
    rows.sort(key=lambda row: (_sane(row[2].usage.started), row[1]))
    end = max(_sane(done.usage.started) + _cost(done) for _, _, done in rows) or 1.0
    left, wide, high = 170, 790, 22
    step = 10 ** math.floor(math.log10(end))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if end / (step * part) <= 10)
    bottom = high * min(len(rows), MAX_ROWS) + 6
    drawn: list[str] = []
    for i in range(int(end / step + 1e-9) + 1):
        x = left + i * step / end * wide
        drawn.append(f'<path class="grid" d="M{x:.1f} 0V{bottom}"/>')
        drawn.append(f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{_time(i * step)}</text>')
    for row, (at, id, done) in enumerate(rows[:MAX_ROWS]):
        used, x = done.usage, left + _sane(done.usage.started) / end * wide
        phases = [("queue", used.queue_time), ("computed", used.prefill_time), ("generated", used.decode_time)]
        parts: list[str] = []
        for kind, seconds in phases:
            length = _sane(seconds) / end * wide
            if length:
                parts.append(
                    f'<rect class="{kind}" x="{x:.2f}" y="4" width="{max(length, 0.75):.2f}" height="{high - 8}"/>'
                )
            x += length
        told = ", ".join(
            f"{name} {_time(_sane(s))}" for name, s in zip(("queue", "prefill", "decode"), (p[1] for p in phases))
        )
        name = _text(_label(graph, id), 80)
        hot = " critical" if id in critical else ""
        drawn.append(
            f'<a class="row{hot}" data-box href="#b{at}" aria-label="{name}: started at {_time(_sane(used.started))}, {told}">'
            f"<title>{name}: {told}</title>"
            f'<svg y="{row * high + 3}" width="{left + wide + 10}" height="{high}"><rect class="hit" width="100%" height="{high}"/>'
            f'<text x="{left - 10}" y="15" text-anchor="end">{_text(_snippet(_label(graph, id), 20))}</text>{"".join(parts)}</svg></a>'
        )
    keys = (("queue", "queue"), ("computed", "prefill"), ("generated", "decode"))
    legend = "".join(f'<li><span class="key {kind}"></span>{name}</li>' for kind, name in keys)
    size = f'width="{left + wide + 30}" height="{bottom + 22}" viewBox="0 0 {left + wide + 30} {bottom + 22}"'
    return f"""<section aria-labelledby="time"><h2 id="time">Timeline</h2><ul class="legend">{legend}</ul>
{_cut(len(rows), MAX_ROWS, "generations are shown, by their start")}<div class="canvas" tabindex="0" role="region" aria-label="Timeline of the generations">
<svg id="gantt" {size} role="group" aria-label="When each generation waited, was prefilled and decoded">{"".join(drawn)}</svg></div></section>"""


def _details(graph: ProgramGraph, at: int, box: Box, critical: set[int], most: int) -> str:
    failed, done = _failure(graph, box), graph.done.get(box.main)
    item = graph.nodes[box.main]
    hot = not critical.isdisjoint(box.nodes)
    marks = ('<span class="mark crit">critical path</span>' if hot else "") + (
        '<span class="mark bad">failed</span>' if failed else ""
    )
    snippet = _text(_snippet(_after(graph, box) or _before(graph, box), 90))
    figures = f"{_tokens(done)} · {_time(_cost(done))}" if done and isinstance(item, (Gen, Select)) else ""
    body: list[str] = []
    if failed is not None:
        body.append(f'<p class="bad"><b>{_text(failed.kind, 40)}:</b> {_long(failed.error, most)}</p>')
    lines = list(dict.fromkeys(graph.lines[id] for id in box.nodes if graph.lines.get(id)))
    if lines:
        body.append(
            f'<p class="quiet">{", ".join(f"<code>{_text(line, 300)}</code>" for line in lines[:8])}{" …" if len(lines) > 8 else ""}</p>'
        )
    if done is not None and figures:
        used = done.usage
        body.append(
            f'<p class="quiet">{used.prompt_tokens:,} prompt tokens: {_tokens(done)} ({used.forced_tokens:,} forced) · queue {_time(_sane(used.queue_time))}, '
            f"prefill {_time(_sane(used.prefill_time))}, decode {_time(_sane(used.decode_time))}</p>"
        )
    body += [_piece(graph, id, most) for id in box.nodes[:500]]
    body.append(_cut(len(box.nodes), 500, "texts of this step are listed"))
    return (
        f'<details id="b{at}"><summary><b><bdi>{_text(_title(graph, box), 80)}</bdi></b> <span class="kind">{item.kind}</span> {marks}'
        f'<bdi class="snippet">{snippet}</bdi><span class="figures">{figures}</span></summary><div class="body">{"".join(body)}</div></details>'
    )


def _piece(graph: ProgramGraph, id: int, most: int) -> str:
    """One node of a box, whole."""
    item = graph.nodes[id]
    branch = f' <span class="quiet">continues sample {item.sample}</span>' if item.sample else ""
    if isinstance(item, Wait):
        return f'<p class="role">waits for {_text(", ".join(item.tools), 80)}</p>'
    if isinstance(item, Role) and item.results:
        told = "".join(
            f'<pre dir="auto">{_text(one.name, 80)}: {_text(one.content, most)}</pre>' for one in item.results
        )
        return f'<p class="role">results of tools</p>{told}'
    if isinstance(item, Role):
        return f'<p class="role">{_text(item.role, 80)} {"begins" if item.begin else "ends"}{branch}</p>'
    if isinstance(item, Fork):
        return f'<p class="role">fork into {item.count:,}</p>'
    if isinstance(item, Join):
        return f'<p class="role">join of {len(item.branches):,}</p>'
    if isinstance(item, Text):
        return f'{branch}<pre dir="auto">{"".join(_part(graph, part, most) for part in item.parts)}</pre>'
    out: list[str] = []
    done = graph.done.get(id)
    if isinstance(item, Select):
        chosen = done.choosing if done is not None else None
        rows: list[str] = []
        for i, choice in enumerate(item.choices[:200]):
            numbers = ""
            if chosen is not None and i < len(chosen.scores) and i < len(chosen.probabilities):
                numbers = f"<td>{chosen.scores[i]:.4g}</td><td>{chosen.probabilities[i]:.1%}</td>"
            best = ' class="best"' if chosen is not None and i == chosen.index else ""
            rows.append(f"<tr{best}><td><bdi>{_long(graph.written(choice), 400)}</bdi></td>{numbers}</tr>")
        head = "<th>score</th><th>probability</th>" if chosen is not None else ""
        out.append(f"<table><tr><th>choice ({_text(item.method, 60)})</th>{head}</tr>{''.join(rows)}</table>")
        out.append(_cut(len(item.choices), 200, "choices are listed"))
    elif isinstance(item, Gen) and (params := params_to_dict(item.params)):
        given = ", ".join(f"{name}={value!r}" for name, value in params.items())
        out.append(f'<p class="quiet params">{_text(given, 2000)}</p>')
    for i, output in enumerate(done.outputs if done is not None else ()):
        ended = "" if output.finish_reason == "stop" else f", ended by {_text(str(output.finish_reason), 40)}"
        title = f"{_label(graph, id)}[{i}]" if len(done.outputs if done else ()) > 1 else _label(graph, id)
        out.append(
            f'<p class="role made">{_text(title, 80)}{ended}</p><pre class="made" dir="auto">{_long(output.text, most)}</pre>'
        )
    return branch + "".join(out)


def _part(graph: ProgramGraph, part: str | Ref | Arg, most: int) -> str:
    if isinstance(part, Arg):
        return f'<span class="arg">{{{_text(part.name, 80)}}}</span>'
    if isinstance(part, Ref):
        text = graph.text_of(part.node, part.sample)
        return f'<span class="ref" title="{_text(_label(graph, part.node), 80)}">{_long(text, most) or "…"}</span>'
    return _long(part, most)


def _curve(points: Sequence[tuple[float, float]]) -> str:
    said = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = (to_y - y) / 2
        said.append(
            f"C{x:.1f} {y + bend:.1f} {to_x:.1f} {to_y - bend:.1f} {to_x:.1f} {to_y:.1f}"
            if x != to_x
            else f"V{to_y:.1f}"
        )
    return "".join(said)
