"""The report: nothing a document says gets out of its place, figures are those of the rows, and it is readable in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.jobs.gold import Score, compare
from radixrt.jobs.report import INTERVALS, About, _intervals, report
from radixrt.jobs.report_style import STYLE
from radixrt.jobs.stats import Point
from radixrt.jobs.survey import MOST_FIELDS, MOST_NUMBERS, MOST_REASONS, MOST_VALUES, Survey
from tests.jobs import browser

VOID = {"meta", "link", "br", "input", "img", "hr"}
SHAPES = {"rect", "path", "line"}


class Page(HTMLParser):
    """What a browser would find: tags with attributes, and text; closing tags must fit."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SHAPES
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


def row(id: Any, value: Any, **more: Any) -> dict[str, Any]:
    return {"id": id, "value": value, **more}


def course(seconds: int = 90, a_second: int = 4) -> list[Point]:
    return [
        Point(float(s), a_second * s, 0, 600 * a_second * s, 450 * a_second * s, 80 * a_second * s)
        for s in range(seconds + 1)
    ]


def sample(count: int = 200) -> str:
    rows = [
        row(
            f"doc-{i}",
            {
                "vendor": f"Company {i % 40} with a rather long name & Sons",
                "currency": ("EUR", "USD", "CHF")[i % 3],
                "date": f"2024-{i % 12 + 1:02}-{i % 28 + 1:02}",
                "paid": i % 4 == 0,
                "total": (i % 50 + 1) ** 3 / 7,
                "note": None if i % 10 else "seldom",
                "items": [{"what": f"thing {j}", "n": j + 1} for j in range(i % 5)],
            },
            **({"parts": 2} if i % 50 == 0 else {}),
            confidence={"vendor": 0.5, "items[0].n": 0.75},
        )
        for i in range(count)
    ]
    errors = [
        {"id": f"bad-{i}", "index": i, "error": f"total is {i}.50, but the items are {i + 1} together"}
        for i in range(7)
    ]
    score = Score(documents=count)
    for each in rows:
        compare(score, each["value"], {**each["value"], "currency": "EUR"})
    return report(
        rows, errors, About("documents.jsonl", [("schema", "models:Invoice")], course(), 0.76, ("vendor",), score)
    )


# ---- figures


def test_the_figures_are_those_of_the_rows() -> None:
    text = " ".join(Page(sample()).text.split())
    for figure in ("rows200", "failed7", "read in parts4", "time90 s", "documents/s4", "cached75.0%"):
        assert figure in text, figure
    assert "75.0% of 216,000 prompt tokens came from the cache (at best 76.0%)." in text
    assert "vendor 100.0% filledconfidence 50%" in text
    assert "note 10.0% filled" in text
    assert "items[].n 100.0% filledconfidence 75%" in text
    assert "7 total is …, but the items are … together" in text
    assert "67 of 200 rows are right in every field." in text


@given(
    st.lists(
        st.fixed_dictionaries({"a": st.none() | st.integers(-5, 5), "b": st.lists(st.sampled_from("xyz"), max_size=3)})
    )
)
@settings(max_examples=60)
def test_fill_rates_and_counts_are_those_of_a_naive_reading(values: list[dict[str, Any]]) -> None:
    survey = Survey(("a", "b"))
    for at, value in enumerate(values):
        survey.row(row(at, value))
    filled = [value["a"] for value in values if value["a"] is not None]
    assert survey.share("a") == (len(filled) / len(values) if values else 0)
    assert sorted(survey.fields["a"].sample) == sorted(filled)
    lists = [value["b"] for value in values]
    assert sorted(survey.fields["b"].sample) == sorted(map(len, lists))
    assert survey.share("b") == (sum(map(bool, lists)) / len(values) if values else 0)
    inside = survey.fields.get("b[]")
    assert (inside.values if inside else Counter()) == Counter(one for each in lists for one in each)


def test_a_field_that_is_named_value_counts_once() -> None:
    survey = Survey()
    survey.row(row(1, {"value": "x"}))
    survey.row(row(2, {"value": None}))
    assert survey.share("value") == 0.5
    plain = Survey()
    plain.row(row(1, "yes"))
    assert plain.share("value") == 1.0


def test_what_is_kept_of_the_rows_is_bounded() -> None:
    survey = Survey()
    for at in range(3 * MOST_NUMBERS):
        survey.row(row(at, {"n": at, "s": f"text {at}"}))
        survey.error({"id": at, "error": "x" * (at % 1500)})
    survey.row(row(0, {f"field {i}": 1 for i in range(2 * MOST_FIELDS)}))
    assert len(survey.fields) == MOST_FIELDS and survey.cut
    assert len(survey.fields["s"].values) == MOST_VALUES and survey.fields["s"].more
    assert len(survey.fields["n"].sample) == MOST_NUMBERS
    assert len(survey.reasons) <= MOST_REASONS + 1
    assert survey.failures.total() == 3 * MOST_NUMBERS
    middle = sorted(survey.fields["n"].sample)[MOST_NUMBERS // 2]
    assert abs(middle / (1.5 * MOST_NUMBERS) - 1) < 0.1  # a sample of all of them, not of the first
    again = Survey()
    for at in range(3 * MOST_NUMBERS):
        again.row(row(at, {"n": at, "s": f"text {at}"}))
    assert again.fields["n"].sample == survey.fields["n"].sample


def test_fields_stand_in_their_order_and_what_is_inside_behind_them() -> None:
    page = report(
        [row(1, {"b": [{"x": 1}], "a": {"y": 2}, "c": 3}), row(2, {"b": [{"z": 4}]})], [], About("t", fields=("a", "b"))
    )
    names = re.findall(r"<h3><bdi>(.*?)</bdi>", page)
    assert names == ["a", "a.y", "b", "b[].x", "b[].z", "c"]
    assert re.findall(r"<span>([\d.]+)% filled", page) == [
        "50.0",
        "100.0",
        "100.0",
        "50.0",
        "50.0",
        "50.0",
    ]  # a.y: of each a


def test_the_same_rows_give_the_same_page() -> None:
    assert sample() == sample()


def test_no_pace_is_made_of_a_moment() -> None:
    """All end at once, behind a long while: that is no thousand a second."""
    late = [Point(8.6, 1, 0, 700, 0, 200), Point(8.75, 8, 0, 5600, 3400, 1600)]
    assert _intervals(late) == [(8.75, late[-1])]
    for points in (course(600), course(5), course(1), late):
        steps = _intervals(points)
        assert 1 <= len(steps) <= INTERVALS
        assert sum(length for length, _ in steps) == pytest.approx(points[-1].seconds)
        for name in ("finished", "prompt_tokens", "cached_tokens", "output_tokens"):
            assert sum(getattr(moved, name) for _, moved in steps) == getattr(points[-1], name)
    assert len(_intervals(course(600))) > INTERVALS // 2


# ---- the page


HOSTILE = [
    "</script><script>alert(1)</script>",
    "</style><style>*{display:none}</style>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload='alert(1)'>",
    "</bdi></article></main>",
    "<!-- ",
    "&lt;b&gt; &#x3c;b&#x3e;",
    "\x00\x08\x1b[31m\x7f\x85\r\n",
    "\u202eevil\u2066\u200f",
    "\ud800 \ufffe",
    "a" * 5000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_texts_stay_texts(text: str) -> None:
    def made(said: str) -> str:
        rows = [row(said, {said or "x": said, "list": [said, {said: said}]}, confidence={said: 1.0}) for _ in range(2)]
        score = Score(documents=1)
        compare(score, {said: said}, {said: 1})
        errors = [{"id": said, "index": 0, "error": said}]
        return report(rows, errors, About(said, [(said, said)], course(3), 0.5, ("list",), score))

    source = made(text)
    source.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200e\u200f\ud800-\udfff]", source)
    shape = [(tag, sorted(attrs)) for tag, attrs in Page(source).tags]
    assert shape == [(tag, sorted(attrs)) for tag, attrs in Page(made("plain")).tags]
    assert len(source) < 60_000


def test_the_page_needs_nothing_from_outside_and_has_no_script() -> None:
    source = sample()
    page = Page(source)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", source)
    assert not [attrs for _, attrs in page.tags if attrs.keys() & {"src", "srcset", "href", "action", "style"}]
    assert "script" not in {tag for tag, _ in page.tags}
    (policy,) = [attrs["content"] or "" for tag, attrs in page.tags if "http-equiv" in attrs]
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'")


ODD: list[list[Any]] = [
    [],
    [None],
    [{}],
    [[]],
    [[[1, [2]], None]],
    ["yes", "no"],
    [5, 5.5, -1e308, 1e308, 10**400, 0],
    [{"n": float(i)} for i in (0, 0)],
    [{"n": 1e-300}, {"n": 1e300}],
    [{"d": "2024-02-30"}, {"d": "2024-02-28"}],
    [{"d": "0001-01-01"}, {"d": "9999-12-31"}],
    [{"x": 1}, {"x": "one"}, {"x": True}, {"x": [1]}, {"x": {"y": 1}}],
    [{"deep": {"er": {"still": [{"more": None}]}}}],
]


@pytest.mark.parametrize("values", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize(
    "points", [[], [Point(0.0, 0, 0, 0, 0, 0)], [Point(1e-9, 1, 0, 0, 0, 0)], course(1), course(5_000)]
)
def test_odd_rows_and_times(values: list[Any], points: list[Point]) -> None:
    source = report((row(at, value) for at, value in enumerate(values)), [], About("odd", points=points))
    Page(source)
    assert not re.search(r'="[^"]*\b(nan|inf)\b[^"]*"', source)
    assert len(source) < 100_000


# ---- in a browser

CHROMIUM = browser.find()
OVERFLOWING = """Array.from(document.querySelectorAll("h1, h2, h3, dt, dd, p, figcaption, article, figure, summary, .ends span"))
  .filter(one => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline").map(one => one.textContent)"""
BARS = """Array.from(document.querySelectorAll("article")).map(one => {
  const track = one.querySelector(".track").getBoundingClientRect(), fill = one.querySelector(".fill").getBoundingClientRect();
  return [one.querySelector("h3").textContent, parseFloat(one.querySelector(".figures").textContent), 100 * fill.width / track.width];
})"""
INKS = """Array.from(document.querySelectorAll("h1, h2, h3, dt, dd, p, summary, .chart text, td")).map(one => {
  const style = getComputedStyle(one);
  let at = one;
  while (at && getComputedStyle(at).backgroundColor === "rgba(0, 0, 0, 0)") at = at.parentElement;
  const ink = one instanceof SVGElement ? style.fill : style.color;
  return [one.textContent.slice(0, 40), ink, getComputedStyle(at || document.body).backgroundColor];
})"""


def luminance(color: str) -> float:
    """Relative luminance as WCAG has it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (RADIXRT_TEST_BROWSER names one)")
async def test_in_a_browser(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    file = tmp_path / "report.html"
    file.write_text(sample(), "utf-8")
    async with browser.page(CHROMIUM) as page:
        await page.look(1280)
        await page.open(file.as_uri())
        pictures = set()
        for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
            await page.look(width, dark)
            assert await page.run("document.documentElement.scrollWidth") == width  # nobody scrolls sideways
            assert await page.run(OVERFLOWING) == []
            bars = await page.run(BARS)
            assert len(bars) == 9
            assert [name for name, share, drawn in bars if abs(share - drawn) > 0.2] == []
            for text, ink, ground in await page.run(INKS):
                light, deep = sorted((luminance(ink), luminance(ground)), reverse=True)
                assert (light + 0.05) / (deep + 0.05) >= 4.5, (text, ink, ground)
            ground = luminance(await page.run("getComputedStyle(document.body).backgroundColor"))
            assert ground < 0.05 if dark else ground > 0.9
            charts = await page.run(
                'Array.from(document.querySelectorAll(".curve")).map(one => one.getBoundingClientRect().width)'
            )
            assert len(charts) == 3 and min(charts) > 0.8 * min(width, 500)
            picture = base64.b64decode(await page.picture())
            pictures.add(picture)
            assert picture.startswith(b"\x89PNG") and struct.unpack(">I", picture[16:20])[0] == width
        assert len(pictures) == 4
        await page.run('document.querySelector("summary").click()')
        assert "bad-0: total is 0.50" in await page.run('document.querySelector("details[open]").innerText')
        assert page.said == []  # neither an error nor a refusal of the policy
        assert page.asked == [file.as_uri()]
