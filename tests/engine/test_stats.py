"""What a perfect cache would have given, over a bounded history."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.engine import stats
from radixrt.engine.stats import OptimalCache


@pytest.mark.parametrize("namespaces", [False, True])
def test_the_history_of_the_optimum_is_bounded_in_nodes(monkeypatch: pytest.MonkeyPatch, namespaces: bool) -> None:
    monkeypatch.setattr(stats, "_MOST_NODES", 500)
    optimum, draw = OptimalCache(), np.random.default_rng(0)
    for i in range(2000):
        tokens = draw.integers(0, 1000, size=draw.integers(1, 6)).astype(np.int32)
        optimum.prompt(tokens, str(i) if namespaces else "")
        assert optimum.prompt(tokens, str(i) if namespaces else "") == 0  # the newest is known
        assert optimum._tree.nodes <= 510
