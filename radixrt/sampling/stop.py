"""Stop strings over streamed text: found across token borders, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence

import regex


class StopStrings:
    """Lets text through, holding back what may be the beginning of a stop string.

    Args:
        stops: the strings; none is empty.
        include: let the matched string through.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._pattern = regex.compile("|".join(regex.escape(stop) for stop in stops)) if stops else None
        self._include = include
        self._held = ""

    def push(self, text: str, active: bool = True) -> tuple[str, str | None]:
        """Take in ``text``; returns what may be shown, and the stop string where one is complete (then the text has ended).

        While not ``active`` nothing is matched or held.
        """
        if self._pattern is None:
            return text, None
        text = self._held + text
        self._held = ""
        if not active or not text:
            return text, None
        found = self._pattern.search(text)
        if found is not None:
            return text[: found.end() if self._include else found.start()], found.group()
        partial = self._pattern.search(text, partial=True)
        if partial is not None:
            self._held = text[partial.start() :]
            return text[: partial.start()], None
        return text, None

    def flush(self) -> str:
        """The sample ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held
