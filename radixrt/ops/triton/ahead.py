"""Owns the description of a kernel as it is shipped, so that it can be compiled without a device and its cubin judged.

Every kernel module has ``configurations() -> Iterator[Ahead]``, which lists what its functions launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TARGETS = (80, 90, 100)  # compute capabilities: A100; H100 and H200; B200


@dataclass(frozen=True, slots=True)
class Ahead:
    """One compilation of a kernel: the types of its arguments, its constants, and how it is launched."""

    name: str  # unique in its module: "decode-bf16-128"
    kernel: Any  # the @triton.jit function
    types: Mapping[str, str]  # of every argument that is no constant: "*bf16", "*i32", "i32", "fp32", ...
    constants: Mapping[str, Any]  # of every tl.constexpr; an argument passed None is one too
    num_warps: int = 4
    num_stages: int = 3
    divisible: tuple[str, ...] = ()  # integers that are multiples of 16 in practice; pointers always are aligned
    targets: tuple[int, ...] = TARGETS
    often: bool = True  # compiled by the tests; else only when all are asked for by hand
