"""Fixtures of the model room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixrt.model.source import installed_default


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    path = installed_default()
    assert path is not None, "the embedded default model is not installed: scripts/setup installs it"
    return path
