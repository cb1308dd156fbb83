"""One page about a job: what it took, what the fields hold, what failed. Self-contained HTML without a script.

Invariants: rows are read once and one at a time; every text of a document or a model is cleaned
and escaped on its way out; the page asks for nothing from outside; the same rows and figures give the same page.
"""

from __future__ import annotations

import datetime
import hashlib
import html
import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from radixrt.jobs.gold import Score
from radixrt.jobs.report_style import STYLE
from radixrt.jobs.stats import Point
from radixrt.jobs.survey import MOST_FIELDS, Field, Survey

SHOWN_REASONS = 30
TOP = 6  # values of a field that are shown
BINS = 24
INTERVALS = 60  # of the time line

_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff\U000e0000-\U000e007f]"
)


@dataclass(frozen=True, slots=True)
class About:
    """What a page says beside the rows.

    Fields:
        title: what was extracted; facts: further settings, each a name and a value.
        points: the course of the job in order, the last one its end; empty: nothing ran.
        optimum: the highest share of prompt tokens that a cache can hold for this job; ``None``: not known.
        fields: top-level fields that a row can have, in their order.
        score: the comparison with a gold file.
    """

    title: str
    facts: Sequence[tuple[str, str]] = ()
    points: Sequence[Point] = ()
    optimum: float | None = None
    fields: Sequence[str] = ()
    score: Score | None = None


# ---- the page


def report(rows: Iterable[Mapping[str, Any]], errors: Iterable[Mapping[str, Any]], about: About) -> str:
    """The page as HTML. ``rows`` and ``errors`` are those of a job's output (``id``, ``value`` ...; ``id``, ``error``)."""
    survey = Survey(about.fields)
    for row in rows:
        survey.row(row)
    for row in errors:
        survey.error(row)
    digest = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = _text(about.title)
    facts = " · ".join(f"{_text(name, 40)} <bdi>{_text(value, 120)}</bdi>" for name, value in about.facts)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}: extraction</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<style>{STYLE}</style></head>
<body>
<header><h1><bdi>{title}</bdi></h1><p class="quiet">{facts}</p></header>
<main>
{_cards(survey, about)}
{_course(about.points)}
{_cache(about)}
{_fields(survey)}
{_gold(about.score)}
{_errors(survey)}
</main>
</body></html>
"""


def _cards(survey: Survey, about: About) -> str:
    cards = [("rows", f"{survey.rows:,}", ""), ("failed", f"{survey.failed:,}", "bad" if survey.failed else "")]
    if survey.split:
        cards.append(("read in parts", f"{survey.split:,}", ""))
    if about.points:
        end = about.points[-1]
        cards.append(("time", _time(end.seconds), ""))
        cards.append(("documents/s", _short(end.finished / end.seconds) if end.seconds else "-", ""))
        cards.append(("cached", _percent(end.cached_tokens, end.prompt_tokens), ""))
        cards.append(("generated", _short(end.output_tokens), ""))
    if about.score is not None:
        cards.append(("all right", _percent(about.score.right, about.score.documents), ""))
    shown = "".join(f'<div><dt>{name}</dt><dd class="{kind}">{value}</dd></div>' for name, value, kind in cards)
    return f'<section aria-label="Totals"><dl class="cards">{shown}</dl></section>'


def _course(points: Sequence[Point]) -> str:
    steps = _intervals(points)
    if not steps:
        return ""
    end = points[-1].seconds
    documents = [(length, moved.finished / length) for length, moved in steps]
    tokens = [(length, moved.output_tokens / length) for length, moved in steps]
    return f"""<section aria-labelledby="course"><h2 id="course">Throughput over time</h2><div class="two">
{_chart("Documents per second", documents, end, "documents")}
{_chart("Generated tokens per second", tokens, end, "generated")}
</div></section>"""


def _cache(about: About) -> str:
    if not about.points or not about.points[-1].prompt_tokens:
        return ""
    end = about.points[-1]
    computed = end.prompt_tokens - end.cached_tokens
    share = end.cached_tokens / end.prompt_tokens
    parts = (("cached", end.cached_tokens), ("computed", computed), ("generated", end.output_tokens))
    whole, x, bar, legend = sum(count for _, count in parts) or 1, 0.0, "", ""
    for kind, count in parts:
        wide = 100 * count / whole
        bar += (
            f'<rect class="{kind}" x="{x:.2f}%" width="{wide:.2f}%" height="18"><title>{kind}: {count:,}</title></rect>'
        )
        legend += f'<li><span class="key {kind}"></span>{kind} {count:,}</li>'
        x += wide
    best = "" if about.optimum is None else f" (at best {about.optimum:.1%})"
    steps = [(length, moved) for length, moved in _intervals(about.points) if moved.prompt_tokens]
    over_time = [(length, moved.cached_tokens / moved.prompt_tokens) for length, moved in steps]
    chart = _chart("Share of prompt tokens from the cache", over_time, end.seconds, "cached", about.optimum)
    return f"""<section aria-labelledby="cache"><h2 id="cache">Cache</h2>
<p>{share:.1%} of {end.prompt_tokens:,} prompt tokens came from the cache{best}.</p>
<svg class="stack" width="100%" height="18" role="img" aria-label="Tokens cached, computed and generated">{bar}</svg>
<ul class="legend">{legend}</ul>
{chart}</section>"""


def _fields(survey: Survey) -> str:
    if not survey.rows:
        return '<section><h2>Fields</h2><p class="note">There are no rows.</p></section>'
    tops = list(dict.fromkeys(re.split(r"\[\]|\.", path)[0] for path in survey.fields))
    # what is inside of a field stands behind it
    ordered = sorted(survey.fields.items(), key=lambda item: tops.index(re.split(r"\[\]|\.", item[0])[0]))
    shown = "\n".join(_field(survey, path, found) for path, found in ordered)
    cut = f'<p class="note">Only the first {MOST_FIELDS:,} fields are shown.</p>' if survey.cut else ""
    return f'<section aria-labelledby="fields"><h2 id="fields">Fields</h2>{cut}<div class="fields">\n{shown}\n</div></section>'


def _field(survey: Survey, path: str, found: Field) -> str:
    share = survey.share(path)
    sure = f"<span>confidence {found.sure / found.judged:.0%}</span>" if found.judged else ""
    return f"""<article><h3><bdi>{_text(path, 100)}</bdi></h3>
<p class="figures"><span>{share:.1%} filled</span>{sure}</p>
<svg class="bar" width="100%" height="6" role="img" aria-label="{share:.1%} filled"><rect class="track" width="100%" height="6" rx="3"/>\
<rect class="fill" width="{100 * share:.2f}%" height="6" rx="3"/></svg>
{_distribution(found)}</article>"""


def _distribution(found: Field) -> str:
    if found.dates and found.dates == found.texts:
        long = max(found.sample) - min(found.sample) > 60
        return _histogram(
            found.sample,
            lambda day: str(datetime.date.fromordinal(round(day)))[: 7 if long else 10],
            whole=True,
            middle=long,  # three whole dates have no room side by side
        )
    if found.lists:
        return '<p class="quiet">elements</p>' + _histogram(found.sample, _short, whole=True)
    if found.numbers and not found.texts:
        return _histogram(found.sample, _plain(found.sample) if found.whole else _short, whole=found.whole)
    if not found.values:
        return f'<p class="quiet">{"objects" if found.objects else "never filled"}</p>'
    return _top(found)


def _top(found: Field) -> str:
    """The most frequent values, with bars."""
    total = found.texts + found.booleans
    ranked = sorted(found.values.items(), key=lambda item: (-item[1], item[0]))
    top = ranked[:TOP] if len(ranked) > TOP + 1 else ranked
    highest = top[0][1]
    if highest == 1 and len(ranked) > TOP:
        such = "".join(f'<li><bdi class="value">{_value(value)}</bdi></li>' for value, _ in top)
        return f'<p class="quiet">all {"that were counted " if found.more else ""}different, such as</p><ol class="top">{such}</ol>'
    lines = []
    for value, count in top:
        lines.append(
            f'<li><bdi class="value">{_value(value)}</bdi><span class="count">{count:,}</span>'
            f'<svg class="bar" width="100%" height="5" aria-hidden="true"><rect class="value" width="{100 * count / highest:.2f}%" height="5" rx="2"/></svg></li>'
        )
    rest = total - sum(count for _, count in top)
    more = f"{'more than ' if found.more else ''}{len(found.values) - len(top):,}"
    other = f'<p class="quiet">and {more} other values, {rest:,} times</p>' if rest else ""
    return f'<ol class="top">{"".join(lines)}</ol>{other}'


def _histogram(sample: Sequence[float], label: Callable[[float], str], *, whole: bool, middle: bool = True) -> str:
    values = sorted(sample)
    low, high, median = values[0], values[-1], values[len(values) // 2]
    log = not whole and low > 0 and high > 50 * median
    bins, count = [], BINS
    if whole and high - low < BINS:
        count = int(high - low) + 1
        edges = [low + at for at in range(count + 1)]
    elif high == low:
        count, edges = 1, [low, high]
    elif log:
        edges = [low * (high / low) ** (at / count) for at in range(count + 1)]
    else:
        edges = [low + (high - low) * (at / count) for at in range(count + 1)]
    bins = [0] * count
    for value in values:
        at = count - 1
        while at > 0 and value < edges[at]:
            at -= 1
        bins[at] += 1
    highest, wide = max(bins), 100 / count
    drawn = []
    for at, number in enumerate(bins):
        tall = 62 * number / highest
        if number:
            ends = label(edges[at]) if whole and high - low < BINS else f"{label(edges[at])} to {label(edges[at + 1])}"
            drawn.append(
                f'<rect class="value" x="{at * wide + wide * 0.06:.2f}%" width="{wide * 0.88:.2f}%" y="{64 - max(tall, 1.5):.1f}" '
                f'height="{max(tall, 1.5):.1f}"><title>{ends}: {number:,}</title></rect>'
            )
    between = f"<span>median {label(median)}{' · log' if log else ''}</span>" if middle else ""
    scale = ", on a logarithmic axis" if log else ""
    said = f"from {label(low)} to {label(high)}, median {label(median)}{scale}"
    return (
        f'<svg class="hist" width="100%" height="65" role="img" aria-label="{said}">{"".join(drawn)}'
        f'<rect class="rule" width="100%" y="64" height="1"/></svg>'
        f'<p class="ends"><span>{label(low)}</span>{between}<span>{label(high)}</span></p>'
    )


def _gold(score: Score | None) -> str:
    if score is None:
        return ""
    lines = []
    for path, found in score.fields.items():
        bars = "".join(
            f'<td class="number">{value:.1%}<svg class="bar" width="100%" height="4" aria-hidden="true"><rect class="track" width="100%" height="4"/>'
            f'<rect class="fill" width="{100 * value:.2f}%" height="4"/></svg></td>'
            for value in (found.accuracy, found.precision, found.recall)
        )
        lines.append(f'<tr><th scope="row"><bdi>{_text(path, 100)}</bdi></th>{bars}</tr>')
    missing = f" {score.missing:,} gold rows have no row." if score.missing else ""
    return f"""<section aria-labelledby="gold"><h2 id="gold">Against gold</h2>
<p>{score.right:,} of {score.documents:,} rows are right in every field.{missing}</p>
<div class="wide" tabindex="0" role="region" aria-label="Scores of the fields"><table class="scores">
<thead><tr><th>field</th><th class="number">right</th><th class="number">precision</th><th class="number">recall</th></tr></thead>
<tbody>{"".join(lines)}</tbody></table></div></section>"""


def _errors(survey: Survey) -> str:
    if not survey.failed:
        return '<section aria-labelledby="errors"><h2 id="errors">Errors</h2><p class="quiet">None.</p></section>'
    lines = []
    for reason, count in survey.failures.most_common(SHOWN_REASONS):
        examples = "".join(f"<li><bdi>{_text(example, 400)}</bdi></li>" for example in survey.reasons[reason])
        lines.append(
            f'<details><summary><b class="bad">{count:,}</b> <bdi>{_text(reason, 200)}</bdi></summary><ul>{examples}</ul></details>'
        )
    left = len(survey.failures) - SHOWN_REASONS
    more = f'<p class="quiet">and {left:,} other reasons</p>' if left > 0 else ""
    return f'<section aria-labelledby="errors"><h2 id="errors">Errors</h2>{"".join(lines)}{more}</section>'


# ---- curves


def _intervals(points: Sequence[Point]) -> list[tuple[float, Point]]:
    """At most ``INTERVALS`` pieces of the time line, none so short that its pace means nothing: how long each is, and
    what was done in it."""
    if not points or points[-1].seconds <= 0:
        return []
    end = points[-1]
    least = max(end.seconds / INTERVALS, min(2.0, end.seconds))
    borders = [Point(0.0, 0, 0, 0, 0, 0)]
    for point in points:
        if point.seconds - borders[-1].seconds >= least and end.seconds - point.seconds >= least:
            borders.append(point)
    steps = []
    for before, now in pairwise([*borders, end]):
        moved = Point(
            now.seconds,
            now.finished - before.finished,
            now.failed - before.failed,
            now.prompt_tokens - before.prompt_tokens,
            now.cached_tokens - before.cached_tokens,
            now.output_tokens - before.output_tokens,
        )
        steps.append((now.seconds - before.seconds, moved))
    return steps


def _chart(title: str, steps: Sequence[tuple[float, float]], end: float, kind: str, level: float | None = None) -> str:
    """Steps (seconds, value) as an area. The shape stretches with the page, its text does not."""
    high, top, bottom = 170, 16, 148
    share = kind == "cached"
    most = 1.0 if share else max((value for _, value in steps), default=0.0) or 1.0
    tick = 0.25 if share else _tick(most / 4)
    most = tick * math.ceil(most / tick - 1e-9)
    rules, words = [], []
    for at in range(round(most / tick) + 1):
        y = bottom - (bottom - top) * at * tick / most
        name = f"{at * tick:.0%}" if share else _short(at * tick)
        rules.append(f'<rect class="rule" width="100%" y="{y:.1f}" height="1"/>')
        words.append(f'<text x="0" y="{y - 3:.1f}">{name}</text>')
    x, line = 1000 * max(end - sum(length for length, _ in steps), 0) / end, list[str]()
    for length, value in steps:
        y = 100 - 100 * min(value / most, 1.0)
        line.append(f"{'L' if line else 'M'}{x:.1f} {y:.2f}")
        x += 1000 * length / end
        line.append(f"L{min(x, 1000):.1f} {y:.2f}")
    curve = "".join(line)
    start = curve[1:].split(" ")[0] if curve else "0"
    shape = (
        f'<svg y="{top}" width="100%" height="{bottom - top}" viewBox="0 0 1000 100" preserveAspectRatio="none">'
        f'<path class="area {kind}" d="{curve}L{min(x, 1000):.1f} 100L{start} 100Z"/><path class="curve {kind}" d="{curve}"/></svg>'
        if curve
        else ""
    )
    best = ""
    if level is not None:
        y = bottom - (bottom - top) * min(max(level, 0.0), 1.0) / most
        best = f'<line class="best" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/><text class="best" x="100%" y="{y - 4 if y > 30 else y + 13:.1f}" text-anchor="end">at best {level:.1%}</text>'
    for at, anchor in ((0, "start"), (1, "middle"), (2, "end")):
        words.append(f'<text x="{50 * at}%" y="{high - 6}" text-anchor="{anchor}">{_time(end * at / 2)}</text>')
    return (
        f'<figure><figcaption>{title}</figcaption><svg class="chart" width="100%" height="{high}" role="img" aria-label="{title} over {_time(end)}">'
        f"{''.join(rules)}{shape}{best}{''.join(words)}</svg></figure>"
    )


# ---- words


def _text(text: str, most: int = 200) -> str:
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return html.escape(_ODD.sub("\N{REPLACEMENT CHARACTER}", cut))


def _value(text: str) -> str:
    return _text(text if text.strip() else f"“{text}”", 60)


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _short(value: float) -> str:
    """A number in a few characters: 0.0312, 4.5, 1,234, 56.7k."""
    value = value + 0.0
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}" if size < 1e16 else f"{value:.3g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _plain(values: Sequence[float]) -> Callable[[float], str]:
    """Years and other small integers without a comma."""
    return (lambda value: f"{value:.0f}") if max(map(abs, values)) < 10_000 else _short


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds else "0 s"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 120:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes} min {rest:02} s" if rest else f"{minutes} min"


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20 ... that is not below ``least``."""
    base: float = 10.0 ** math.floor(math.log10(least))
    return next(base * part for part in (1, 2, 5, 10) if base * part >= least * (1 - 1e-9))
