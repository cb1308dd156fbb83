"""What every test shares: one thread for each process, no network, no deadlines, and one engine on the default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# Before torch or a tokenizer is imported: tests of tiny models gain nothing from threads, and cores are shared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Triton decides when it is imported, by whomever, whether kernels are compiled for a device or interpreted.
os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import pytest

# How long an example takes says nothing about whether it is right.
hypothesis.settings.register_profile(
    "radixrt",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.load_profile("radixrt")


@pytest.fixture(scope="session")
def default_engine() -> Iterator[Any]:
    """An engine on the embedded default model, shared by all tests: leave nothing running in it."""
    from radixrt import Engine

    with Engine(max_total_tokens=16384, check_integrity=True, kernels="torch") as engine:
        yield engine
