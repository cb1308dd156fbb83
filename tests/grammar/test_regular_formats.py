"""Formats against the standard library, and against the official JSON Schema test suite where it lies beside the checkout."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import uuid
from pathlib import Path

import pytest

from radixrt.grammar.regular import CharDfa, format_dfa
from radixrt.grammar.regular.formats import INEXACT, KNOWN, SUBSETS


def made(name: str) -> CharDfa:
    dfa = format_dfa(name)
    assert dfa is not None
    return dfa


def near(dfa: CharDfa, rng: random.Random, alphabet: str, count: int = 1500) -> list[str]:
    """Texts of the language by random walks, and mutations of them."""
    out = []
    for _ in range(count):
        state, text = 0, ""
        for _ in range(200):
            if state in dfa.accepting and rng.random() < 0.3:
                break
            steps = [(c, t) for c in alphabet if (t := dfa.rows[state][dfa.class_of(c)]) != dfa.dead]
            if not steps:
                break
            char, state = rng.choice(steps)
            text += char
        at = rng.randrange(len(text) + 1)
        out += [
            text,
            text[:at] + rng.choice(alphabet) + text[at + 1 :],
            text[:at] + text[at + 1 :],
            text + rng.choice(alphabet),
        ]
    return out


def test_dates_are_those_of_the_calendar() -> None:
    dfa = made("date")
    for year in (1900, 1996, 1999, 2000, 2023, 2024, 2100, 2400):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date(year, month, day)
                except ValueError:
                    assert not dfa.accepts(text), text
                else:
                    assert dfa.accepts(text), text
    leap_days = dfa & CharDfa.from_pattern("[0-9]{4}-02-29", anchored=True)
    assert leap_days.count == sum(y % 4 == 0 and (y % 100 != 0 or y % 400 == 0) for y in range(10_000))


def test_times() -> None:
    rng = random.Random(2)
    dfa = made("date-time")
    for text in near(dfa, rng, "0123456789-:.TtZz+"):
        if dfa.accepts(text) and ":60" not in text[17:20] and not text.startswith("0000"):
            digits = text.upper().replace("Z", "+00:00")
            head, zone = digits[:19], digits[-6:]
            datetime.datetime.fromisoformat(head + zone)
    assert made("date-time") == dfa
    for text in ("23:59:60Z", "23:59:60.5+00:00", "00:00:00.123-23:59", "12:00:00z"):
        assert made("time").accepts(text)
    for text in (
        "22:59:60Z",
        "23:59:61Z",
        "24:00:00Z",
        "12:00:00",
        "12:00Z",
        "12:00:00+24:00",
        "12:00:00.Z",
        "1:00:00Z",
    ):
        assert not made("time").accepts(text)
    assert dfa.accepts("1998-12-31T23:59:60Z") and not dfa.accepts("1998-12-30T23:59:60Z")


@pytest.mark.parametrize(("name", "alphabet"), [("ipv4", "0123459."), ("ipv6", "0129afF:.:::")])
def test_addresses_are_what_ipaddress_takes(name: str, alphabet: str) -> None:
    dfa, rng = made(name), random.Random(4)
    parse = ipaddress.IPv4Address if name == "ipv4" else ipaddress.IPv6Address
    texts = near(dfa, rng, alphabet) + ["".join(rng.choices(alphabet, k=rng.randrange(18))) for _ in range(3000)]
    texts += [":".join(rng.choice(["", "1", "abcd", "0"]) for _ in range(rng.randrange(1, 10))) for _ in range(5000)]
    taken = 0
    for text in texts:
        try:
            parse(text)
        except ValueError:
            assert not dfa.accepts(text), text
        else:
            taken += 1
            assert dfa.accepts(text), text
    assert taken > 500


def test_uuids() -> None:
    for n in range(50):
        text = str(uuid.UUID(int=random.Random(n).getrandbits(128)))
        assert made("uuid").accepts(text) and made("uuid").accepts(text.upper()) and not made("uuid").accepts(text[1:])


TABLE = [
    (
        "hostname",
        ["a", "a.b-c.d", "3com.com", "x" * 63 + ".de", ".".join(["y" * 30] * 8)],
        ["", "-a", "a-", "a..b", "a.", "x" * 64],
    ),
    ("hostname", ["a--b"], ["ab--c", "xn--x", "a_b", "a b", ".".join(["y" * 63] * 4), "é.de"]),
    (
        "email",
        ["a@b", "a.b+c@d.example", '"a b"@c', '"\\""@c', "a@[1.2.3.4]", "a@[IPv6:::1]"],
        ["a", "@b", "a..b@c", ".a@b", "a@"],
    ),
    ("email", ["x" * 64 + "@y"], ["x" * 65 + "@y", "a@b@c", "a b@c", "a@[1.2.3.256]"]),
    ("idn-email", ["δοκιμή@παράδειγμα.δοκιμή", "a@b"], ["δ", "é" * 17 + "@a"]),
    ("idn-hostname", ["straße.de", "例え.テスト", "a-b"], ["", "-é", "a..b", "\u0301a", "\u3164"]),
    (
        "uri",
        ["http://a/b?c#d", "mailto:a@b", "urn:x:y", "a:", "http://[::1]:80/", "x://u:p@h/%20"],
        ["", "/a", "a b:", "1a:", "a:%2"],
    ),
    (
        "uri",
        ["http://1.2.3.4", "tel:+1-2", "ldap://[2001:db8::7]/c=GB?one?two"],
        ["http://[::1", "a:é", "a:\\", "http://a[b]", "a:<b>"],
    ),
    ("uri-reference", ["", "/a", "//h/p", "?q", "#f", "a/b", "./a:b", "http://x"], ["a b", "#a#b", "\\", ":a", "%"]),
    ("iri", ["http://é/木?\ue000", "a:b"], ["é:", "a: ", "http://a/\ue000"]),
    ("iri-reference", ["é", "#木", ""], ["a b", "\ue000"]),
    (
        "uri-template",
        ["", "/a{b}", "{+x,y:3,z*}{?q}", "é%20", "{a.b}", "it's"],
        ["{", "}", "{}", "{a,}", "{=a}", "a b", "%2", "{a:0}", '"'],
    ),
    ("json-pointer", ["", "/", "/a~0b~1/é", "//"], ["a", "/~", "/~2"]),
    ("relative-json-pointer", ["0", "1/a", "12#", "0+1", "0-1/b"], ["", "01", "-1", "0##", "/a", "0+0"]),
    (
        "duration",
        ["P1D", "P1Y2M3DT4H5M6S", "PT1M", "P2W", "PT1H1M", "P1YT1S"],
        ["", "P", "PT", "P1", "P1Y2D", "PT1H1S", "P1W1D", "1D"],
    ),
]


@pytest.mark.parametrize(("name", "taken", "refused"), TABLE)
def test_what_a_format_takes(name: str, taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not made(name).accepts(text)] == []
    assert [text for text in refused if made(name).accepts(text)] == []


def test_every_format_is_made_once_and_others_are_unknown() -> None:
    for name in KNOWN:
        assert made(name) is made(name) and not made(name).is_empty
    assert format_dfa("no-such-format") is None and all(format_dfa(name) is None for name in INEXACT)
    assert SUBSETS < KNOWN and not INEXACT & KNOWN


def test_the_official_suite_never_sees_a_wrong_text_taken() -> None:
    root = Path(__file__).parents[3] / "shared" / "data" / "json_schema_suite"
    files = sorted(root.glob("draft*/optional/format/*.json"))
    if not files:
        pytest.skip("no JSON Schema test suite here")
    wrong, count = [], 0
    for file in files:
        for case in json.loads(file.read_text()):
            name = case["schema"].get("format", "")
            dfa = format_dfa(name)
            for test in case["tests"]:
                text, valid = test["data"], test["valid"]
                if dfa is None or not isinstance(text, str):
                    continue
                count += 1
                if dfa.accepts(text) != valid and not (valid and name in SUBSETS):
                    wrong.append((name, text, valid))
    assert wrong == [] and count > 500
