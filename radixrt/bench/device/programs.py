"""Section ``programs``: what the radix cache is worth to agent programs on the device, and what a JSON schema costs a step."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from radixrt import Constraint, SamplingParams
from radixrt.bench.backends import RadixBackend
from radixrt.bench.device.engine import decoding, settings
from radixrt.bench.device.figures import Bench
from radixrt.bench.device.model import random_engine
from radixrt.bench.workloads import build
from radixrt.grammar.built import native_module

_WORKLOADS = ("few-shot", "tree-of-thought")


def run(bench: Bench) -> None:
    bench.part("workloads", lambda: _workloads(bench))
    bench.part("masks", lambda: _masks(bench))


def _workloads(bench: Bench) -> None:
    took: dict[tuple[str, bool], float] = {}
    for cached in (True, False):
        with random_engine(bench, reference=bench.small, **settings(bench), disable_radix_cache=not cached) as engine:
            backend = RadixBackend(engine)
            for name in _WORKLOADS[: bench.pick(2, 1)]:
                encode = partial(engine.tokenizer.encode, add_special=False)
                work = build(name, encode, scale=bench.pick(2.0, 0.05))
                backend.prepare(work)
                start = time.perf_counter()
                backend.execute(work)
                took[name, cached] = time.perf_counter() - start
                if cached:
                    stats = engine.stats()
                    bench.add(f"{name}: {work.about}", took[name, True], "s")
                    note = f"the optimum is {100 * stats.optimal_hit_rate:.1f} %"
                    bench.add(f"{name}: hit rate", stats.hit_rate, "of prompt tokens", note=note)
    for name in _WORKLOADS[: bench.pick(2, 1)]:
        quick, slow = took[name, True], took[name, False]
        bench.add(f"{name}: cache on beside off", slow / quick, "x", note=f"{quick:.3g} s, {slow:.3g} s")


def _masks(bench: Bench) -> None:
    count, length, items = bench.pick((64, 2048, 20), (3, 200, 2))
    constraint = Constraint.json_schema(_schema(items))
    plain = SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True)
    bound = SamplingParams(max_tokens=length, temperature=1.0, constraint=constraint)
    with random_engine(bench, reference=bench.small, **settings(bench), jump_forward=False) as engine:
        start = time.perf_counter()
        engine.compile(constraint).result()
        bench.add("compiling the schema", time.perf_counter() - start, "s")
        free, masked = (decoding(bench, engine, [params] * count).step for params in (plain, bound))
    matchers = "native matchers" if native_module() is not None else "the Python matchers: nothing was built"
    note = f"{masked * 1e3:.3g} ms beside {free * 1e3:.3g} ms a step; {matchers}"
    bench.add(f"a JSON schema for {count} requests costs", masked / free - 1, "of a step", at_most=True, note=note)


def _schema(items: int) -> dict[str, Any]:
    """A list of so many objects: long enough that no request ends while steps are timed."""
    properties = {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["invoice", "letter", "receipt"]},
        "amount": {"type": "number"},
        "paid": {"type": "boolean"},
    }
    row = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "array", "minItems": items, "items": row}
