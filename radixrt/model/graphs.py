"""DecodeGraphs owns the steps of decodes that are recorded once for each of some batch sizes and replayed: one launch in place of hundreds.

    batch of 11 decodes      |-- 11 rows --|
    recorded for 16          |-- 11 rows --|-- 5 rows of padding: write to a scratch slot, read nothing of anyone --|

Invariants: a recorded step reads its inputs at fixed addresses, and all of them are written before each replay, padding too; padding
writes nothing but the scratch slot, which is no page of the pool; a batch that fits none of the sizes, or is not all decodes, is not run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from radixrt.model.device import upload
from radixrt.ops.interface import IntArray

_SMALL = (1, 2, 4)  # sizes below the first multiple of _STEP
_STEP = 8
_KEYS = (
    1 << 21
)  # that the plans of one size have room for, 4 bytes each, unless that is less than _LEAST_KEYS for each sequence
_LEAST_KEYS = 4096


def graph_sizes(most: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, 8, 16, 24 ... up to ``most``, which is one of them."""
    sizes = [size for size in (*_SMALL, *range(_STEP, most, _STEP)) if size < most]
    return (*sizes, most)


def padded(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the ascending ``sizes`` that holds ``count``; ``None``: none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def keys_for(size: int, longest: int) -> int:
    """Tokens that each sequence of a recorded batch may have: as many as there can be, while the plans stay small."""
    return min(longest, max(_KEYS // size, _LEAST_KEYS))


class StepPlan(Protocol):
    """An attention plan at fixed addresses, for one window."""

    plan: Any  # what ``Ops.attention`` takes

    def update(self, q_lens: IntArray, kv_lens: IntArray, kv_slots: IntArray) -> None:
        """Make it the plan of this batch; sequences without queries are padding."""


@runtime_checkable
class FixedPlans(Protocol):
    """Operations whose attention can be planned at fixed addresses: ``Ops`` may have this too."""

    def fixed_plan(
        self, batch: int, max_kv: int, heads: int, kv_heads: int, window: int | None, beside: StepPlan | None
    ) -> StepPlan:
        """A plan for the decodes of ``batch`` sequences at most, of ``max_kv`` tokens each.

        ``beside``: one for another window that is updated first, with the same batches.
        """


P = TypeVar("P", bound=StepPlan)
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Mapping[Any, Any]], None]


class Recorded(Generic[P]):
    """The step of ``size`` decodes: its inputs, and how it is run again."""

    def __init__(self, size: int, max_kv: int, scratch: int, device: torch.device, plans: Mapping[Any, P]) -> None:
        self.size, self.max_kv, self.scratch = size, max_kv, scratch
        self.plans = plans
        self._inputs = torch.zeros((3, size), dtype=torch.int32, device=device)
        self._inputs[2] = scratch
        self.replay: Callable[[], None] | None = None

    @property
    def tokens(self) -> torch.Tensor:
        return self._inputs[0]

    def run(self, step: Step) -> None:
        """The step on the inputs as they stand."""
        plans = {window: held.plan for window, held in self.plans.items()}
        step(self.tokens, self._inputs[1], self._inputs[2], plans)

    def write(self, tokens: IntArray | torch.Tensor, positions: IntArray, write_slots: IntArray) -> None:
        """Set the inputs: token 0 at position 0 in the scratch slot where there is no decode."""
        count = len(positions)
        host = np.zeros((3, self.size), dtype=np.int32)
        host[1, :count] = positions
        host[2, :count] = write_slots
        host[2, count:] = self.scratch
        if not isinstance(tokens, torch.Tensor):
            host[0, :count] = tokens
        upload(host, self._inputs)
        if isinstance(tokens, torch.Tensor):
            self.tokens[:count].copy_(tokens)


class DecodeGraphs(Generic[P]):
    """Records steps when it is made.

    Args:
        sizes: ascending, see ``graph_sizes``.
        longest: tokens of the longest sequence there can be, see ``keys_for``.
        scratch: a slot that nobody else uses.
        plans: makes the plans of a batch size with so many keys each, by window.
        step: computes tokens at positions, writing to slots (int32 ``[size]`` each), with the plans of the windows.
        record: runs a step once and returns how it is run again; see ``record_cuda``.
    """

    def __init__(
        self,
        sizes: tuple[int, ...],
        longest: int,
        scratch: int,
        device: torch.device,
        plans: Callable[[int, int], Mapping[Any, P]],
        step: Step,
        record: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self.sizes = sizes
        self._recorded: dict[int, Recorded[P]] = {}
        for size in reversed(sizes):  # the largest first: the others find their memory in its
            keys = keys_for(size, longest)
            one = self._recorded[size] = Recorded(size, keys, scratch, device, plans(size, keys))
            self._update(one, *(np.zeros(0, dtype=np.int32),) * 2)
            one.replay = record(lambda one=one: one.run(step))  # type: ignore[misc]

    def run(
        self,
        tokens: IntArray | torch.Tensor,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
    ) -> bool:
        """Compute a batch, see ``ForwardBatch``; False: it is to be computed otherwise, and nothing was done."""
        size = padded(len(q_lens), self.sizes)
        if size is None or len(positions) != len(q_lens):
            return False
        one = self._recorded[size]
        if int(kv_lens.max()) > one.max_kv:
            return False
        one.write(tokens, positions, write_slots)
        self._update(one, kv_lens, kv_slots)
        assert one.replay is not None
        one.replay()
        return True

    def _update(self, one: Recorded[P], kv_lens: IntArray, kv_slots: IntArray) -> None:
        spare = np.zeros(one.size - len(kv_lens), dtype=np.int32)
        queries = np.concatenate((np.ones(len(kv_lens), dtype=np.int32), spare))
        for plan in one.plans.values():
            plan.update(queries, np.concatenate((kv_lens, spare)), kv_slots)


def record_cuda(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Records into CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # compiles and allocates what must not happen while it is recorded
            step()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            step()
        return graph.replay

    return record
