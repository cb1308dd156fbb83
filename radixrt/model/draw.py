"""QueuedDraw: tokens that a device draws while the host goes on. The next step reads them there; the host, when the step has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from radixrt.model.device import upload
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.sampler import Sampled, chosen
from radixrt.sampling.wishes import Wishes


@runtime_checkable
class Drawer(Protocol):
    """Operations that draw without the host: ``Ops`` may have this too."""

    def draw(
        self,
        logits: torch.Tensor,
        masks: torch.Tensor | None,
        mask_rows: torch.Tensor | None,
        wishes: Wishes | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A token of each row of ``logits [R, V]`` float32, which may be overwritten.

        Args:
            masks: int32 ``[M, ceil(V / 32)]``, see ``sampling.mask``. mask_rows: int32 ``[R]``: each row's mask, -1: all tokens may come.
            wishes: with tensors for arrays, and ``None`` for the filters where no row has one; ``None``: the likeliest token of each row.

        Returns:
            tokens, int32 ``[R]``, and each row's largest allowed logit, float32 ``[R]``; where that is not finite there is no token.
        """


@dataclass(frozen=True, slots=True)
class QueuedDraw:
    """``ids``: on the device. The other two are on their way to the host."""

    ids: torch.Tensor
    host_ids: torch.Tensor
    host_logits: torch.Tensor

    def collect(self) -> list[Sampled]:
        """The tokens, when the device has come that far."""
        return chosen(self.host_ids.numpy(), self.host_logits.numpy())


def queue_draw(
    drawer: Drawer, logits: torch.Tensor, wishes: Wishes | None, allowed: Sequence[Bitmask | None]
) -> QueuedDraw:
    """Have ``drawer`` draw a token for each row; waits for nothing."""
    device, words = logits.device, -(-logits.shape[1] // 32)
    given = [mask[:words] for mask in allowed if mask is not None]
    masks = mask_rows = None
    if given:
        rows = np.cumsum([mask is not None for mask in allowed]) - 1
        masks = _sent(np.stack(given), device)
        mask_rows = _sent(np.where([mask is not None for mask in allowed], rows, -1).astype(np.int32), device)
    moved: Any = None
    if wishes is not None:
        filters = wishes.top_k.any() or (wishes.top_p < 1).any() or wishes.min_p.any()
        absent = () if filters else ("top_k", "top_p", "min_p")
        values = {name: array for name, array in wishes._asdict().items() if name not in absent}
        moved = Wishes(**{**dict.fromkeys(absent), **{name: _sent(array, device) for name, array in values.items()}})
    ids, best = drawer.draw(logits, masks, mask_rows, moved)
    return QueuedDraw(ids, _fetched(ids), _fetched(best))


def _sent(array: np.ndarray[Any, Any], device: torch.device) -> Any:
    host = torch.from_numpy(np.ascontiguousarray(array))
    return upload(array, torch.empty(host.shape, dtype=host.dtype, device=device))


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return out.copy_(tensor, non_blocking=True)
