"""Reads the JSON text of an object member by member: the values are checked, and stay the text that they were."""

from __future__ import annotations

import re

import msgspec

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ESCAPE = re.compile(r"\\u(?=[0-9a-fA-F]{4})")
_SLASHES, _CODE = "\ufdd0", "\ufdd1"  # are no characters: stand in for escapes


def members(text: str) -> dict[str, str] | None:
    """The texts of the values, whole; ``None``: the text is not the JSON of an object (``NaN`` and its like are not)."""
    found, hidden = _read(text)
    if found is None:
        return None
    values = {name: bytes(value).decode() for name, value in found.items()}
    if hidden:
        return {name: value.replace(_CODE, "\\u").replace(_SLASHES, "\\\\") for name, value in values.items()}
    return values


def is_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    return _read(text)[0] is not None


def _read(text: str) -> tuple[dict[str, msgspec.Raw] | None, bool]:
    """The members, and whether escapes were hidden from the decoder, which takes no half surrogate pairs."""
    try:
        return _MEMBERS.decode(text), False
    except (msgspec.DecodeError, ValueError, RecursionError):
        if "\\u" not in text or _SLASHES in text or _CODE in text:
            return None, False
    try:
        return _MEMBERS.decode(_ESCAPE.sub(_CODE, text.replace("\\\\", _SLASHES))), True
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None, False
