"""Whether the compiled part of this package is there: looked for once, at first use; everything it does, Python does too."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

logger = logging.getLogger(__name__)


@cache
def native_module() -> Any:
    """The compiled part, or None where it was not built."""
    try:
        return importlib.import_module("radixrt.grammar._native")
    except ImportError as error:
        logger.warning("constrained decoding runs without its compiled part, slowly: %s", error)
        return None
