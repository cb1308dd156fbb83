"""Rotary position frequencies: plain and scaled (linear, dynamic NTK, YaRN, Llama 3, LongRoPE), as numbers for a cos/sin table.

A token's keys stay in the cache whatever is computed later, so frequencies must not depend on how long a sequence
happens to be. ``dynamic`` is therefore fixed by the longest length the engine allows (as its authors' formula gives for
that length); below the trained length it is the plain table. ``longrope`` has two sets of factors: the long one is taken
where the engine allows more than the trained length, for every sequence, and the short one where it does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from radixrt.checks import real
from radixrt.errors import ModelError, shown
from radixrt.model.config import ModelConfig, Rope

_LEAST = 1e-6  # of a number that something is divided by
_MOST_SCALE = 1024.0  # of a factor on cos and sin


def inverse_frequencies(config: ModelConfig, max_len: int, kind: int = 0) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, float32 ``[rotary_dim / 2]``, and the factor on cos and sin.

    Sources: Su et al. 2021 (RoPE); kaiokendev 2023 (linear); bloc97 2023 (dynamic NTK); Peng et al. 2023
    (YaRN); the Llama 3.1 release (llama3); Ding et al. 2024 (longrope).

    Args:
        max_len: longest sequence, in tokens.
        kind: which of ``config.ropes``.

    Raises:
        ModelError: an unknown rope_type, or a parameter of it that is missing or out of range.
    """
    rope = config.ropes[kind]
    frequencies, factor = _inverse_frequencies(config, rope, max_len)
    if not bool(torch.isfinite(frequencies).all()):
        raise ModelError(f"rope_theta={rope.theta:g} gives frequencies that are no numbers")
    return frequencies, factor


def _inverse_frequencies(config: ModelConfig, rope: Rope, max_len: int) -> tuple[torch.Tensor, float]:
    scaling = rope.scaling
    dim, base = config.rotary_dim, rope.theta
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return _plain(dim, base), 1.0
    if kind == "linear":
        return _plain(dim, base) / _number(scaling, "factor", 1.0), 1.0
    if kind == "dynamic":
        if dim <= 2:
            raise ModelError(f"rope_type='dynamic' needs a head_dim above 2, not {dim}")
        factor = _number(scaling, "factor", 1.0)
        trained = config.max_position
        length = max(max_len, trained)
        base = base * ((factor * length / trained) - (factor - 1)) ** (dim / (dim - 2))
        return _plain(dim, base), 1.0
    if kind == "llama3":
        return _llama3(scaling, _plain(dim, base)), 1.0
    if kind == "yarn":
        return _yarn(scaling, config, dim, base)
    if kind == "longrope":
        return _longrope(scaling, config, _plain(dim, base), max_len)
    raise ModelError(
        f"rope_type={shown(kind)} is not supported; supported: default, linear, dynamic, yarn, llama3, longrope"
    )


def longest_context(config: ModelConfig) -> int:
    """Tokens a sequence may have at most. ``max_position`` is the default; scaling allows its factor times the trained length,
    where that is more and is asked for."""
    trained = config.max_position
    if not config.ropes:
        return trained
    scaling = config.ropes[0].scaling
    kind = scaling.get("rope_type", "default")
    if kind in ("default", "longrope"):
        return trained
    if kind in ("yarn", "llama3"):
        trained = int(_number(scaling, "original_max_position_embeddings", 1, config.max_position))
    return max(config.max_position, int(trained * _number(scaling, "factor", 1.0, 1.0)))


def cos_sin_table(config: ModelConfig, max_len: int, kind: int = 0) -> torch.Tensor:
    """Cosines and sines of every position, float32 ``[max_len, 2, rotary_dim / 2]``; ``kind``: which of ``config.ropes``."""
    frequencies, factor = inverse_frequencies(config, max_len, kind)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return torch.stack((angles.cos() * factor, angles.sin() * factor), dim=1)


def _plain(dim: int, base: float) -> torch.Tensor:
    return 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _llama3(scaling: Mapping[str, Any], plain: torch.Tensor) -> torch.Tensor:
    factor = _number(scaling, "factor", 1.0)
    low = _number(scaling, "low_freq_factor", _LEAST)
    high = _number(scaling, "high_freq_factor", _LEAST)
    trained = _number(scaling, "original_max_position_embeddings", 1)
    if high <= low:
        raise ModelError(f"rope_scaling: high_freq_factor={high} must be above low_freq_factor={low}")
    wavelength = 2 * math.pi / plain
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > trained / low, plain / factor, plain)
    between = (wavelength <= trained / low) & (wavelength >= trained / high)
    return torch.where(between, blended, scaled)


def _yarn(scaling: Mapping[str, Any], config: ModelConfig, dim: int, base: float) -> tuple[torch.Tensor, float]:
    trained = _number(scaling, "original_max_position_embeddings", 1, config.max_position)
    factor = _number(scaling, "factor", 1.0, config.max_position / trained)
    if base <= 1:
        raise ModelError(f"rope_theta={base:g} must be above 1 for rope_type='yarn'")
    mscale, all_dim = (_number(scaling, name, 0.0, 0.0, _MOST_SCALE) for name in ("mscale", "mscale_all_dim"))
    attention = _mscale(factor, mscale) / _mscale(factor, all_dim) if mscale and all_dim else _mscale(factor, 1.0)
    attention = _number(scaling, "attention_factor", _LEAST, attention, _MOST_SCALE)
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ModelError(f"rope_scaling: truncate={shown(truncate)} must be true or false")

    def dimension(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(_number(scaling, "beta_fast", _LEAST, 32.0))
    high = dimension(_number(scaling, "beta_slow", _LEAST, 1.0))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    plain = _plain(dim, base)
    return plain / factor * ramp + plain * (1 - ramp), attention


def _longrope(
    scaling: Mapping[str, Any], config: ModelConfig, plain: torch.Tensor, max_len: int
) -> tuple[torch.Tensor, float]:
    trained = _number(scaling, "original_max_position_embeddings", 2, config.max_position)
    factor = _number(scaling, "factor", _LEAST, config.max_position / trained)
    attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    attention = _number(scaling, "attention_factor", _LEAST, attention, _MOST_SCALE)
    short, long = (_factors(scaling, name, len(plain)) for name in ("short_factor", "long_factor"))
    return plain / (long if max_len > trained else short), attention


def _factors(scaling: Mapping[str, Any], name: str, count: int) -> torch.Tensor:
    values = scaling.get(name)
    numbers = [real(value) for value in values] if isinstance(values, (list, tuple)) else []
    good = [number for number in numbers if number is not None and _LEAST <= number <= 1 / _LEAST]
    if len(numbers) != count or len(good) != count:
        raise ModelError(f"rope_scaling: {name}={shown(values)} must be a list of {count} numbers above 0")
    return torch.tensor(good, dtype=torch.float32)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(
    scaling: Mapping[str, Any], name: str, low: float, default: float | None = None, high: float = 2**31 - 1
) -> float:
    value = scaling.get(name)
    value = default if value is None else value
    number = real(value)
    if number is None or not low <= number <= high:
        raise ModelError(f"rope_scaling: {name}={shown(value)} must be a number from {low:g} to {high:.10g}")
    return number
