"""JSON Schema's string formats, each from its own RFC, as automata; built at first use and kept.

A language here never holds a text its RFC refuses. Where the RFC's own language is not regular, or too large for an automaton, it
is a subset, and the comment beside it says which texts are left out.
"""

from __future__ import annotations

from functools import lru_cache

from radixrt.grammar.regular.chardfa import CharDfa
from radixrt.grammar.regular.charset import CharSet, chars, charset, minus

# Formats JSON Schema defines that no automaton describes well enough: patterns nest their brackets without end.
INEXACT = frozenset({"regex"})

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR, _MINUTE, _FRACTION = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]", r"(?:\.[0-9]+)?"
_TIME = f"{_HOUR}:{_MINUTE}:{_MINUTE}{_FRACTION}(?:[zZ]|[+-]{_HOUR}:{_MINUTE})"

# Formats whose automaton is a subset of the format: sound to allow, but not to forbid. Their complement is too wide.
SUBSETS = frozenset({"time", "date-time", "email", "idn-email", "hostname", "idn-hostname", "uri-template"})

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"

_UNRESERVED, _SUB = r"A-Za-z0-9\-._~", "!$&'()*+,;="
_PERCENT = "%[0-9A-Fa-f]{2}"


def format_dfa(name: str) -> CharDfa | None:
    """The texts of a format; ``None``: unknown, or one of ``INEXACT``."""
    maker = _MAKERS.get(name)
    return None if maker is None else _made(name)


@lru_cache(maxsize=64)
def _made(name: str) -> CharDfa:
    return _MAKERS[name]()


def _matching(pattern: str) -> CharDfa:
    return CharDfa.from_pattern(pattern, anchored=True)


# ---- RFC 3339: dates and times; ISO 8601 durations as in its appendix A


def _date() -> CharDfa:
    return _matching(_DATE)


# A leap second is the last one of June or December, in UTC. Left out: leap seconds written in another zone, which would need
# an automaton ten times as large.
_LEAP_SECOND = f"23:59:60{_FRACTION}(?:[zZ]|[+-]00:00)"


def _time() -> CharDfa:
    return _matching(f"{_TIME}|{_LEAP_SECOND}")


def _date_time() -> CharDfa:
    return _matching(f"{_DATE}[tT]{_TIME}|[0-9]{{4}}-(?:06-30|12-31)[tT]{_LEAP_SECOND}")


def _duration() -> CharDfa:
    n = "[0-9]+"
    seconds, minutes = f"{n}S", f"{n}M(?:{n}S)?"
    time = f"T(?:{n}H(?:{minutes})?|{minutes}|{seconds})"
    days, months = f"{n}D", f"{n}M(?:{n}D)?"
    return _matching(f"P(?:(?:{n}Y(?:{months})?|{months}|{days})(?:{time})?|{time}|{n}W)")


# ---- RFC 1123 and 5321: host names and mail


def _hostname() -> CharDfa:
    """RFC 1123. Left out: labels with ``--`` in third place (``xn--`` must be checked by decoding it), and some long names.

    The 253 characters are counted in eight blocks of 31, of which each label takes as many as it and its dot need: names of up
    to eight labels of up to 30 characters, or of fewer longer ones (63 at most), are all in.
    """
    alphabet = [charset([(0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)]), chars("-"), chars(".")]

    def step(state: tuple[int, int, bool], symbol: int) -> tuple[int, int, bool] | None:
        used, at, hyphen = state
        if symbol == 2:
            used += -(-(at + 1) // 31)
            return None if at == 0 or hyphen or used == 8 else (used, 0, False)
        if at == 63 or used + -(-(at + 2) // 31) > 8 or (symbol == 1 and (at == 0 or (at == 3 and hyphen))):
            return None
        return used, at + 1, symbol == 1

    return CharDfa.explore((0, 0, False), step, lambda s: s[1] > 0 and not s[2], alphabet, name="the host name")


def _simple_letters() -> CharSet:
    """Letters IDNA 2008 allows anywhere in a label, alone and next to one another, written left to right: one case, no marks."""
    return charset(
        [
            *((0x30, 0x39), (0x61, 0x7A), (0xDF, 0xF6), (0xF8, 0xFF)),  # ASCII, Latin-1
            *((0x3AC, 0x3CE), (0x430, 0x45F)),  # Greek, Cyrillic
            *((0x561, 0x586), (0x10D0, 0x10FA), (0xE01, 0xE30), (0xE40, 0xE46)),  # Armenian, Georgian, Thai
            *(
                (0x3041, 0x3096),
                (0x30A1, 0x30FA),
                (0x3400, 0x4DBF),
                (0x4E00, 0x9FFF),
                (0xAC00, 0xD7A3),
            ),  # kana, Han, Hangul
        ]
    )


def _idn_hostname() -> CharDfa:
    # Left out: scripts not listed above, combining marks, characters with rules about their neighbours, and labels with
    # other letters than ASCII that are longer than 12 characters (their ASCII form might pass 63).
    simple = _simple_letters()
    ascii_letters = charset([(0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A)])
    beyond = minus(simple, ascii_letters)
    alphabet = [ascii_letters, chars("-"), chars("."), beyond]

    def step(state: tuple[int, int, bool, bool], symbol: int) -> tuple[int, int, bool, bool] | None:
        labels, at, hyphen, foreign = state
        if symbol == 2:
            return None if at == 0 or hyphen or labels == 3 else (labels + 1, 0, False, False)
        if (at == 0 or (at == 3 and hyphen)) and symbol == 1:
            return None
        foreign = foreign or symbol == 3
        if at + 1 > (12 if foreign else 60):
            return None
        return labels, at + 1, symbol == 1, foreign

    return CharDfa.explore((0, 0, False, False), step, lambda s: s[1] > 0 and not s[2], alphabet, name="the host name")


_ATEXT = r"A-Za-z0-9!#$%&'*+\-/=?\^_`{|}~"


def _mailbox(atoms: str, quoted: str, domain: CharDfa) -> CharDfa:
    local = _matching(f'[{atoms}]+(?:\\.[{atoms}]+)*|"(?:[{quoted}]|\\\\[ -~])*"') & CharDfa.length(1, 64)
    literal = _matching(rf"\[(?:{_IPV4}|IPv6:{_ipv6_pattern()})\]")
    return local.concat(CharDfa.literal("@")).concat(domain | literal)


def _email() -> CharDfa:
    return _mailbox(_ATEXT, r" !#-\[\]-~", _made("hostname"))


def _idn_email() -> CharDfa:
    # RFC 6531 adds every non-ASCII character to the local part; 64 octets are 16 characters at worst
    beyond = "\\u0080-\\u{10FFFF}"
    ascii_part = _mailbox(_ATEXT, r" !#-\[\]-~", _made("idn-hostname"))
    local = _matching(f"[{_ATEXT}{beyond}]+(?:\\.[{_ATEXT}{beyond}]+)*") & CharDfa.length(1, 16)
    return ascii_part | _made("email") | local.concat(CharDfa.literal("@")).concat(_made("idn-hostname"))


# ---- RFC 2673, 4291: addresses


def _ipv4() -> CharDfa:
    return _matching(_IPV4)


def _ipv6_pattern() -> str:
    """RFC 4291 by the alternatives of RFC 3986: how many groups stand before ``::`` and how many may follow."""
    parts = [f"(?:{_H16}:){{6}}{_LS32}"]
    for after in range(5, -1, -1):
        before = 5 - after
        head = f"(?:(?:{_H16}:){{0,{before - 1}}}{_H16})?" if before else ""
        parts.append(f"{head}::(?:{_H16}:){{{after}}}{_LS32}" if after else f"{head}::{_LS32}")
    parts.append(f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}")
    parts.append(f"(?:(?:{_H16}:){{0,6}}{_H16})?::")
    return f"(?:{'|'.join(parts)})"


def _ipv6() -> CharDfa:
    return _matching(_ipv6_pattern())


# ---- RFC 3986, 3987, 6570: identifiers


def _reference(*, international: bool, relative: bool) -> CharDfa:
    more = private = ""
    if international:
        planes = "".join(f"\\u{{{plane:X}0000}}-\\u{{{plane:X}FFFD}}" for plane in range(1, 14))
        planes = planes.replace("\\u{E0000}", "\\u{E1000}")
        more = r"\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF" + planes + r"\u{E1000}-\u{EFFFD}"
        private = r"\uE000-\uF8FF\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"
    plain = _UNRESERVED + more
    pchar = f"(?:[{plain}{_SUB}:@]|{_PERCENT})"
    segment_nc = f"(?:[{plain}{_SUB}@]|{_PERCENT})+"
    user, name = f"(?:[{plain}{_SUB}:]|{_PERCENT})*", f"(?:[{plain}{_SUB}]|{_PERCENT})*"
    address = rf"\[(?:{_ipv6_pattern()}|[vV][0-9A-Fa-f]+\.[{_UNRESERVED}{_SUB}:]+)\]"
    authority = f"(?:{user}@)?(?:{address}|{name})(?::[0-9]*)?"
    path = f"(?:/{pchar}*)*"
    rooted = f"/(?:{pchar}+{path})?"
    tail = rf"(?:\?(?:{pchar}|[/?{private}])*)?(?:#(?:{pchar}|[/?])*)?"
    absolute = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?://{authority}{path}|{rooted}|{pchar}+{path}|){tail}"
    if not relative:
        return _matching(absolute)
    return _matching(f"{absolute}|(?://{authority}{path}|{rooted}|{segment_nc}{path}|){tail}")


def _uri() -> CharDfa:
    return _reference(international=False, relative=False)


def _uri_reference() -> CharDfa:
    return _reference(international=False, relative=True)


def _iri() -> CharDfa:
    return _reference(international=True, relative=False)


def _iri_reference() -> CharDfa:
    return _reference(international=True, relative=True)


def _uri_template() -> CharDfa:
    # Left out: the operators = , ! @ | that RFC 6570 keeps for the future.
    planes = "".join(f"\\u{{{plane:X}0000}}-\\u{{{plane:X}FFFD}}" for plane in range(1, 14))
    beyond = (
        r"\u00A0-\uD7FF\uE000-\uF8FF\uF900-\uFDCF\uFDF0-\uFFEF" + planes + r"\u{E1000}-\u{EFFFD}"
        r"\u{F0000}-\u{FFFFD}\u{100000}-\u{10FFFD}"
    )
    literal = rf"(?:[!#$&-;=?-\[\]_a-z~{beyond}]|{_PERCENT})"
    varchar = f"(?:[A-Za-z0-9_]|{_PERCENT})"
    varspec = rf"{varchar}(?:\.?{varchar})*(?:\*|:[1-9][0-9]{{0,3}})?"
    return _matching(rf"(?:{literal}|\{{[+#./;?&]?{varspec}(?:,{varspec})*\}})*")


# ---- RFC 4122, 6901 and the draft of relative JSON pointers


def _uuid() -> CharDfa:
    x = "[0-9a-fA-F]"
    return _matching(f"{x}{{8}}(?:-{x}{{4}}){{3}}-{x}{{12}}")


def _json_pointer() -> CharDfa:
    return _matching(r"(?:/(?:[^~/]|~[01])*)*")


def _relative_json_pointer() -> CharDfa:
    return _matching(r"(?:0|[1-9][0-9]*)(?:[+-][1-9][0-9]*)?(?:#|(?:/(?:[^~/]|~[01])*)*)")


_MAKERS = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": _duration,
    "email": _email,
    "idn-email": _idn_email,
    "hostname": _hostname,
    "idn-hostname": _idn_hostname,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "uri": _uri,
    "uri-reference": _uri_reference,
    "iri": _iri,
    "iri-reference": _iri_reference,
    "uri-template": _uri_template,
    "uuid": _uuid,
    "json-pointer": _json_pointer,
    "relative-json-pointer": _relative_json_pointer,
}
KNOWN = frozenset(_MAKERS)
