"""The measuring scripts do what they say; their figures are not judged here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).parents[2] / "scripts" / "bench"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_script_{name}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tree_costs_keeps_the_tree_at_its_size() -> None:
    """The script itself asserts full matches, cached stems, one leaf an eviction, and the tree's integrity."""
    took = script("tree_costs").measure(leaves=200, rounds=20)
    assert {name: len(values) for name, values in took.items()} == {"match": 20, "insert": 20, "evict": 20}


def test_startup_reports_every_phase_in_order(tiny_model: Path) -> None:
    seen = script("startup").once(str(tiny_model))
    assert 0 < seen["python"] < seen["import"] < seen["load"] < seen["first"]
    assert seen["peak"] > 50 * 2**20, "less memory than torch alone takes"


def test_compare_has_the_published_goals() -> None:
    from radixrt.bench.workloads import WORKLOADS

    goals = {goal.workload: goal.low for goal in script("compare").GOALS}
    assert goals == {"few-shot": 5.0, "tree-of-thought": 3.0, "unshared": 1.0, "single-stream": 1.0}
    assert goals.keys() <= WORKLOADS.keys()
