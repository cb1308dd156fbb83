"""Owns the draw: one token for each row of logits, in a fixed number of kernels that never wait for the host.

    edit      changes the few logits that penalties and biases name, in place
    survey    reads the row in parts: of each its best, and the sum of its weights exp((logit - best) / temperature)
    tally     filtered rows: how many tokens lie in each eighth of a nat below the best
    gather    filtered rows: collects the tokens that the filters might keep, as far down as the tally says
    settle    greedy rows: the best; unfiltered rows: the part where the distribution is inverted, read once more
    select    filtered rows: searches among the collected tokens, or the whole row where they were too many, for the values at
              which top-k, top-p and min-p cut and at which the distribution is inverted; nothing is sorted

Invariants: what is asked for means what it means in ``radixrt.sampling.sampler``; of equal logits the lowest id comes first. Weights
are summed as integers (multiples of 2^-43), so that no sum depends on the order of its parts: a row's token depends on nothing but the
row, and is the same in every run. All buffers have sizes that follow from the shape of the logits alone, so that a CUDA graph can
hold the whole draw. Cost: the logits are read once; three times where a row is filtered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from radixrt.ops.triton.ahead import Ahead

_PART = 4096  # tokens of a row that one program reads
_BINS = 256  # eighths of a nat below the best; the last holds all further down
_CANDIDATES = 8192  # tokens of a row that are collected at most
_EDITORS = 8  # programs that share the edits of a row
_BLOCK = 1024  # tokens that a search looks at together
_THRESHOLDS = 8  # of a search that are tried together


class Edits(NamedTuple):
    """Changed logits, ``(logit / factor if logit > 0 else logit * factor) + add``, as ``radixrt.sampling.wishes`` makes them.

    Those of row ``r`` lie between ``ends[r - 1]`` (0 for the first) and ``ends[r]``; no id stands twice in a row. The arrays may
    be longer than the last end says.
    """

    ends: torch.Tensor  # int32 [R]
    ids: torch.Tensor  # int32 [E]
    factors: torch.Tensor  # float32 [E]
    adds: torch.Tensor  # float32 [E]


def draw(
    logits: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    chances: torch.Tensor | None = None,
    edits: Edits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token for each row.

    Args:
        logits: ``[R, V]``, the last dimension dense; float32 if there are ``edits``, which change it in place.
        masks: int32 ``[M, ceil(V / 32)]``: token ``t`` may come if bit ``t % 32`` of word ``t // 32`` is set.
        mask_rows: int32 ``[R]``: the mask of each row, -1 for none; without it row ``r`` has mask ``r``.
        temperature: float32 ``[R]``, 0 for the likeliest token; without it all rows are greedy.
        top_k: int32 ``[R]``, 0 for all. top_p, min_p: float32 ``[R]``. Either all three are given or none.
        chances: float64 ``[R]`` in [0, 1): where the distribution of each row is inverted. Needed with ``temperature``.

    Returns:
        tokens int32 ``[R]`` and each row's largest allowed logit, float32 ``[R]``. Where that is not finite (nothing is allowed, or a
        logit is not a number) there is no token, and 0 stands in its place.
    """
    rows, vocab = logits.shape
    filtered = top_k is not None
    if (temperature is None) != (chances is None):
        raise ValueError("temperature, chances: either both are given or neither")
    if filtered != (top_p is not None) or filtered != (min_p is not None) or (filtered and temperature is None):
        raise ValueError("top_k, top_p, min_p: either all are given, with a temperature, or none")
    if edits is not None and logits.dtype is not torch.float32:
        raise ValueError(f"logits are {logits.dtype}: edits need float32")

    def buffer(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

    tokens, best = buffer(torch.int32), buffer(torch.float32)
    if not rows:
        return tokens, best
    stride = logits.stride(0)
    mask_stride = 0 if masks is None else masks.stride(0)
    source = (logits, stride, masks, mask_stride, mask_rows)
    parts = triton.cdiv(vocab, _PART)
    sizes = {"PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts), "PART": _PART}
    part_best, part_token = buffer(torch.float32, parts), buffer(torch.int32, parts)
    part_sum = None if temperature is None else buffer(torch.int64, parts)
    tally = buffer(torch.int32, _BINS + 1) if filtered else None  # the last: tokens collected
    surveyed = (part_best, part_token, part_sum)
    if edits is not None:
        _edit[(rows, _EDITORS)](logits, stride, *edits, EDITORS=_EDITORS, BLOCK=128, num_warps=4)
    _survey[(rows, parts)](*source, temperature, *surveyed, tally, vocab, BINS=_BINS, **sizes, num_warps=8)
    wishes = (temperature, top_k, top_p, min_p)
    if filtered:
        values, ids = buffer(torch.float32, _CANDIDATES), buffer(torch.int32, _CANDIDATES)
        _tally[(rows, parts)](*source, *wishes, *surveyed, tally, vocab, BINS=_BINS, **sizes, num_warps=8)
        _gather[(rows, parts)](
            *source, *wishes, *surveyed, tally, values, ids, vocab, BINS=_BINS, CANDIDATES=_CANDIDATES, **sizes, num_warps=8
        )  # fmt: skip
    _settle[(rows,)](*source, *wishes, chances, *surveyed, tokens, best, vocab, **sizes, num_warps=8)
    if filtered:
        for whole, warps in ((False, 4), (True, 16)):
            _select[(rows,)](
                *source, *wishes, chances, *surveyed, tally, values, ids, tokens, vocab, BINS=_BINS, CANDIDATES=_CANDIDATES,
                WHOLE=whole, BLOCK=_BLOCK, WAYS=_THRESHOLDS, **sizes, num_warps=warps,
            )  # fmt: skip
    return tokens, best


@triton.jit
def _edit(logits, stride, ends, ids, factors, adds, EDITORS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(ends + row - 1, row > 0, other=0)
    end = tl.load(ends + row)
    for start in range(first + tl.program_id(1) * BLOCK, end, EDITORS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        target = logits + row.to(tl.int64) * stride + tl.load(ids + at, inside, other=0)
        factor, add = tl.load(factors + at, inside, other=1.0), tl.load(adds + at, inside, other=0.0)
        logit = tl.load(target, inside, other=0.0)
        tl.store(target, tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor) + add, inside)


@triton.jit
def _read(logits, stride, masks, mask_stride, mask_rows, row, token, inside):
    """The logits of a row's tokens as float32, -inf for those that may not come."""
    logit = tl.load(logits + row.to(tl.int64) * stride + token, inside, other=-float("inf")).to(tl.float32)
    if masks is not None:
        mask_row = row if mask_rows is None else tl.load(mask_rows + row)
        used = inside & (tl.zeros_like(token) + mask_row >= 0)
        word = tl.load(masks + mask_row.to(tl.int64) * mask_stride + token // 32, used, other=-1)
        logit = tl.where((word >> (token % 32)) & 1 == 1, logit, -float("inf"))
    return logit + 0.0  # no -0.0


@triton.jit
def _weight(logit, best, temperature):
    """``exp((logit - best) / temperature)``, 0 for a logit that is not finite."""
    score = tl.div_rn(logit - best, temperature)
    return tl.where(score <= 0, tl.exp(score), 0.0)


@triton.jit
def _fixed(weight):
    """A weight in [0, 1] as an integer; sums of 2^19 of them have room."""
    return (weight * 8796093022208.0 + 0.5).to(tl.int64)


@triton.jit
def _survey(
    logits, stride, masks, mask_stride, mask_rows, temperature, part_best, part_token, part_sum, tally, vocab,
    BINS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    logit = _read(logits, stride, masks, mask_stride, mask_rows, row, token, token < vocab)
    number = tl.abs(logit) <= float("inf")
    best = tl.max(tl.where(number, logit, -float("inf")), axis=0)
    tl.store(part_token + row * PARTS + part, tl.min(tl.where(logit == best, token, vocab), axis=0))
    if part_sum is not None:
        heat = tl.maximum(tl.load(temperature + row), 1e-6)
        tl.store(part_sum + row * PARTS + part, tl.sum(_fixed(_weight(logit, best, heat)), axis=0))
    best = tl.where(tl.min(number.to(tl.int32), axis=0) == 0, float("nan"), best)
    tl.store(part_best + row * PARTS + part, best)
    if tally is not None and part == 0:
        tl.store(tally + row * (BINS + 1) + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
        tl.store(tally + row * (BINS + 1) + BINS, 0)


@triton.jit
def _best(part_best, row, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """A row's largest logit, and the same of each part."""
    part = tl.arange(0, PARTS_BLOCK)
    each = tl.load(part_best + row * PARTS + part, part < PARTS, other=-float("inf"))
    number = tl.abs(each) <= float("inf")
    best = tl.max(tl.where(number, each, -float("inf")), axis=0)
    return tl.where(tl.min(number.to(tl.int32), axis=0) == 0, float("nan"), best), each


@triton.jit
def _masses(each, best, heat, part_sum, row, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr):
    """Of each part the sum of the weights, float64 in units of ``_fixed``, where a weight is 1 at the best of the row."""
    part = tl.arange(0, PARTS_BLOCK)
    sums = tl.load(part_sum + row * PARTS + part, part < PARTS, other=0).to(tl.float64)
    return sums * _weight(each, best, heat).to(tl.float64)


@triton.jit
def _is_filtered(top_k, top_p, min_p, row):
    return (tl.load(top_k + row) > 0) | (tl.load(top_p + row) != 1.0) | (tl.load(min_p + row) != 0.0)


@triton.jit
def _searched(best, heat, top_k, top_p, min_p, row):
    """Whether a row is drawn with filters."""
    return (heat > 0) & (tl.abs(best) < float("inf")) & _is_filtered(top_k, top_p, min_p, row)


@triton.jit
def _bin(logit, best, heat, BINS: tl.constexpr):
    below = tl.div_rn(best - logit, heat) * 8.0
    return tl.minimum(below, BINS - 1.0).to(tl.int32)


@triton.jit
def _tally(
    logits, stride, masks, mask_stride, mask_rows, temperature, top_k, top_p, min_p, part_best, part_token, part_sum, tally, vocab,
    BINS: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    best, _ = _best(part_best, row, PARTS, PARTS_BLOCK)
    heat = tl.load(temperature + row)
    if _searched(best, heat, top_k, top_p, min_p, row):
        token = part * PART + tl.arange(0, PART)
        logit = _read(logits, stride, masks, mask_stride, mask_rows, row, token, token < vocab)
        finite = logit > -float("inf")
        place = _bin(tl.where(finite, logit, best), best, tl.maximum(heat, 1e-6), BINS)
        counts = tl.histogram(place, BINS, mask=finite)
        bins = tl.arange(0, BINS)
        tl.atomic_add(tally + row * (BINS + 1) + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _deepest(counts, total, top_k, top_p, min_p, row, BINS: tl.constexpr):
    """The last bin with tokens that the filters might keep, or that the sum of the top-k needs."""
    bins = tl.arange(0, BINS)
    upto = tl.cumsum(counts, axis=0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    # what lies below bin b weighs no more than this
    heaviest = counts.to(tl.float64) * tl.exp(bins.to(tl.float32) * -0.125).to(tl.float64)
    below = tl.sum(heaviest, axis=0) - tl.cumsum(heaviest, axis=0)
    by_k = tl.min(tl.where(upto >= k, bins, BINS - 1), axis=0)
    enough = below * 8796093022208.0 <= (1.0 - p.to(tl.float64) - 1e-5) * total
    by_p = tl.min(tl.where(enough, bins, BINS - 1), axis=0)
    by_least = tl.minimum(tl.log(tl.maximum(least, 1e-30)) * -8.0 + 1.0, BINS - 1.0).to(tl.int32)
    limit = tl.where(k > 0, by_k, BINS - 1)
    limit = tl.where((p < 1.0) & (k <= 0), by_p, limit)
    # with top-p the sum of the whole top-k is needed
    return tl.where((k > 0) & (p < 1.0), limit, tl.minimum(limit, tl.maximum(by_least, 0)))


@triton.jit
def _gather(
    logits, stride, masks, mask_stride, mask_rows, temperature, top_k, top_p, min_p, part_best, part_token, part_sum, tally,
    values, ids, vocab,
    BINS: tl.constexpr, CANDIDATES: tl.constexpr, PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    best, each = _best(part_best, row, PARTS, PARTS_BLOCK)
    heat = tl.load(temperature + row)
    if _searched(best, heat, top_k, top_p, min_p, row):
        heat = tl.maximum(heat, 1e-6)
        total = tl.sum(_masses(each, best, heat, part_sum, row, PARTS, PARTS_BLOCK), axis=0)
        counts = tl.load(tally + row * (BINS + 1) + tl.arange(0, BINS))
        limit = _deepest(counts, total, top_k, top_p, min_p, row, BINS)
        count = tl.sum(tl.where(tl.arange(0, BINS) <= limit, counts, 0), axis=0)
        if count > CANDIDATES:
            if part == 0:
                tl.store(tally + row * (BINS + 1) + BINS, count)
        else:
            token = part * PART + tl.arange(0, PART)
            logit = _read(logits, stride, masks, mask_stride, mask_rows, row, token, token < vocab)
            finite = logit > -float("inf")
            taken = finite & (_bin(tl.where(finite, logit, best), best, heat, BINS) <= limit)
            number = tl.sum(taken.to(tl.int32), axis=0)
            if number > 0:
                start = tl.atomic_add(tally + row * (BINS + 1) + BINS, number, sem="relaxed")
                to = row * CANDIDATES + start + tl.cumsum(taken.to(tl.int32), axis=0) - 1
                tl.store(values + to, logit, taken)
                tl.store(ids + to, token, taken)


@triton.jit
def _settle(
    logits, stride, masks, mask_stride, mask_rows, temperature, top_k, top_p, min_p, chances, part_best, part_token, part_sum,
    tokens, bests, vocab,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    best, each = _best(part_best, row, PARTS, PARTS_BLOCK)
    tl.store(bests + row, best)
    part = tl.arange(0, PARTS_BLOCK)
    first = tl.load(part_token + row * PARTS + part, part < PARTS, other=vocab)
    usable = tl.abs(best) < float("inf")
    tl.store(tokens + row, tl.where(usable, tl.min(tl.where(each == best, first, vocab), axis=0), 0))
    if temperature is not None:
        heat = tl.load(temperature + row)
        plain = usable & (heat > 0)
        if top_k is not None:
            plain = plain & (_is_filtered(top_k, top_p, min_p, row) == 0)
        if plain:
            heat = tl.maximum(heat, 1e-6)
            mass = _masses(each, best, heat, part_sum, row, PARTS, PARTS_BLOCK)
            until = tl.cumsum(mass, axis=0)
            target = tl.load(chances + row) * tl.sum(mass, axis=0)
            last = tl.max(tl.where(mass > 0, part, 0), axis=0)  # rounding must not lead behind it
            found = tl.min(tl.where((until > target) & (mass > 0), part, last), axis=0)
            rest = target - tl.sum(tl.where(part < found, mass, 0.0), axis=0)
            token = found * PART + tl.arange(0, PART)
            logit = _read(logits, stride, masks, mask_stride, mask_rows, row, token, token < vocab)
            weight = _fixed(_weight(logit, best, heat))
            until = tl.cumsum(weight, axis=0)
            # all weights of a part may round to 0 here: then its best
            last = tl.max(tl.where(weight > 0, token, tl.load(part_token + row * PARTS + found)), axis=0)
            over = (until.to(tl.float64) > rest) & (weight > 0)
            tl.store(tokens + row, tl.min(tl.where(over, token, last), axis=0))


@triton.jit
def _key(logit):
    """Integers in the order of floats."""
    bits = logit.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _fetch(source, start, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the tokens that are searched: keys, ids and weights; the key of what is no token is below all others."""
    values, ids, count, logits, stride, masks, mask_stride, mask_rows, row, best, heat = source
    at = start + tl.arange(0, BLOCK)
    inside = at < count
    if WHOLE:
        token = at
        logit = _read(logits, stride, masks, mask_stride, mask_rows, row, token, inside)
    else:
        token = tl.load(ids + at, inside, other=0)
        logit = tl.load(values + at, inside, other=-float("inf"))
    key = tl.where(logit > -float("inf"), _key(logit), -0x80000000)
    return key, token, _weight(logit, best, heat)


@triton.jit
def _above(source, thresholds, equal, BY_ID: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys lie above each threshold, and their weights; ``BY_ID``: how many ids with the key ``equal``."""
    number = tl.zeros_like(thresholds).to(tl.int32)
    mass = tl.zeros_like(thresholds)
    threshold = thresholds.to(tl.int32)[:, None]
    for start in range(0, source[2], BLOCK):
        key, token, weight = _fetch(source, start, WHOLE, BLOCK)
        if BY_ID:
            key = tl.where(key == equal, token, -1)
        over = key[None, :] > threshold
        number += tl.sum(over.to(tl.int32), axis=1)
        if not BY_ID:
            mass += tl.sum(tl.where(over, _fixed(weight)[None, :], 0), axis=1)
    return number, mass


@triton.jit
def _search(
    source, low, high, fewer, lighter, equal, BY_ID: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr
):  # fmt: skip
    """The smallest key in (low, high] above which lie fewer than ``fewer`` tokens, of less than ``lighter`` in all; else ``high``.

    With it, what lies above it. It is the key of a token if ``low`` is one less than the key of a token.
    """
    way = tl.arange(0, WAYS)
    low, high = low.to(tl.int64), high.to(tl.int64)
    number, mass = high.to(tl.int32) * 0, high * 0  # above the highest there is nothing
    beyond = number - 1  # above low; not known yet
    while (high - low > 1) & (beyond - number != 1):
        step = (high - low + WAYS - 3) // (WAYS - 1)
        threshold = tl.minimum(low + 1 + way * step, high)
        numbers, masses = _above(source, threshold, equal, BY_ID, WHOLE, BLOCK)
        fits = ((numbers < fewer) & (masses < lighter)) | (threshold == high)
        first = tl.min(tl.where(fits, way, WAYS), axis=0)
        here = way == first
        number, mass = tl.sum(tl.where(here, numbers, 0), axis=0), tl.sum(tl.where(here, masses, 0), axis=0)
        high = tl.sum(tl.where(here, threshold, 0), axis=0)
        beyond = tl.where(first > 0, tl.sum(tl.where(way == first - 1, numbers, 0), axis=0), beyond)
        low = tl.where(first > 0, low + 1 + (first - 1) * step, low)
    if high - low > 1:  # there is one token left
        last = tl.full((BLOCK,), -0x80000000, tl.int32)
        for start in range(0, source[2], BLOCK):
            key, token, _ = _fetch(source, start, WHOLE, BLOCK)
            if BY_ID:
                key = tl.where(key == equal, token, -1)
            last = tl.maximum(last, tl.where(key <= high, key, -0x80000000))
        high = tl.max(last, axis=0).to(tl.int64)
    return high.to(tl.int32), number, mass


@triton.jit
def _lowest(source, least, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest key, and the lowest whose token has a weight of ``least`` or more, and not 0."""
    lowest = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    enough = lowest
    for start in range(0, source[2], BLOCK):
        key, _, weight = _fetch(source, start, WHOLE, BLOCK)
        key = tl.where(key == -0x80000000, 0x7FFFFFFF, key)
        lowest = tl.minimum(lowest, key)
        enough = tl.minimum(enough, tl.where((weight >= least) & (weight > 0), key, 0x7FFFFFFF))
    return tl.min(lowest, axis=0), tl.min(enough, axis=0)


@triton.jit
def _equals(source, equal, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have this key, and the first and last id of them."""
    number = tl.zeros((BLOCK,), tl.int32)
    first = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    last = number
    for start in range(0, source[2], BLOCK):
        key, token, _ = _fetch(source, start, WHOLE, BLOCK)
        same = key == equal
        number += same.to(tl.int32)
        first = tl.where(same, tl.minimum(first, token), first)
        last = tl.where(same, tl.maximum(last, token), last)
    return tl.sum(number, axis=0), tl.min(first, axis=0), tl.max(last, axis=0)


@triton.jit
def _select(
    logits, stride, masks, mask_stride, mask_rows, temperature, top_k, top_p, min_p, chances, part_best, part_token, part_sum,
    tally, values, ids, tokens, vocab,
    BINS: tl.constexpr, CANDIDATES: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    best, each = _best(part_best, row, PARTS, PARTS_BLOCK)
    heat = tl.load(temperature + row)
    count = tl.load(tally + row * (BINS + 1) + BINS)
    if _searched(best, heat, top_k, top_p, min_p, row) & ((count > CANDIDATES) == WHOLE):
        heat = tl.maximum(heat, 1e-6)
        if WHOLE:
            count = vocab
        source = (
            values + row * CANDIDATES, ids + row * CANDIDATES, count, logits, stride, masks, mask_stride, mask_rows, row, best, heat,
        )  # fmt: skip
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        k = tl.where(k > 0, k, 0x7FFFFFFF)
        any_mass = tl.full((), 1 << 62, tl.int64)
        top = _key(best)
        lowest, lightest = _lowest(source, tl.load(min_p + row), WHOLE, BLOCK)
        # Ordered from the best down, what is kept is a prefix. First what top-p is a part of, and the weight that is enough:
        enough = any_mass
        if p < 1.0:
            total = tl.sum(_masses(each, best, heat, part_sum, row, PARTS, PARTS_BLOCK), axis=0)
            if k < vocab:
                cut, above, mass = _search(source, lowest - 1, top, k, any_mass, 0, False, WHOLE, BLOCK, WAYS)
                ties, _, _ = _equals(source, cut, WHOLE, BLOCK)
                total = (mass + tl.minimum(k - above, ties) * _fixed(_weight(_logit(cut), best, heat))).to(tl.float64)
            # in float32, as the sampler has it
            share = p * (total * 1.1368683772161603e-13).to(tl.float32)
            enough = tl.ceil(share.to(tl.float64) * 8796093022208.0).to(tl.int64)
        # The last value that is kept, and how many of the tokens that have it:
        cut, above, mass = _search(source, lightest - 1, top, k, enough, 0, False, WHOLE, BLOCK, WAYS)
        ties, _, _ = _equals(source, cut, WHOLE, BLOCK)
        weight = _fixed(_weight(_logit(cut), best, heat))
        room = tl.ceil((enough - mass).to(tl.float64) / tl.maximum(weight, 1).to(tl.float64))
        kept = tl.maximum(tl.minimum(tl.minimum(ties, k - above).to(tl.float64), room), 1.0).to(tl.int64)
        mass += kept * weight
        # The value at which the distribution of what is kept is inverted, and which of the tokens that have it:
        target = tl.minimum((tl.load(chances + row) * mass.to(tl.float64)).to(tl.int64), mass - 1)
        drawn, _, before = _search(source, cut - 1, top, 0x7FFFFFFF, target + 1, 0, False, WHOLE, BLOCK, WAYS)
        ties, first, last = _equals(source, drawn, WHOLE, BLOCK)
        weight = tl.maximum(_fixed(_weight(_logit(drawn), best, heat)), 1)
        place = ((target - before).to(tl.float64) / weight.to(tl.float64)).to(tl.int64)
        place = tl.minimum(place, ties - 1).to(tl.int32)
        if place > 0:
            first, _fewer, _mass = _search(
                source, first - 1, last, ties - place, any_mass, drawn, True, WHOLE, BLOCK, WAYS
            )
        tl.store(tokens + row, first)


def configurations() -> Iterator[Ahead]:
    """What ``draw`` launches, for vocabularies of 131072 and of 262208 tokens.

    Rows are greedy, drawn, or filtered; float32 logits, which are what models give, with masks and without.
    """
    pointers = {
        "masks": "*i32", "mask_rows": "*i32", "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32",
        "chances": "*fp64", "part_best": "*fp32", "part_token": "*i32", "part_sum": "*i64", "tally": "*i32", "values": "*fp32",
        "ids": "*i32", "tokens": "*i32", "bests": "*fp32",
    }  # fmt: skip
    numbers = {"stride": "i32", "mask_stride": "i32", "vocab": "i32"}
    sizes = {"BINS": _BINS, "CANDIDATES": _CANDIDATES, "BLOCK": _BLOCK, "WAYS": _THRESHOLDS, "PART": _PART}

    def ahead(
        name: str, kernel: Any, logits: str, warps: int, parts: int, without: tuple[str, ...], **constants: int
    ) -> Ahead:
        constants |= sizes | {"PARTS": parts, "PARTS_BLOCK": triton.next_power_of_2(parts)}
        names = kernel.arg_names
        absent = [n for n in without if n in names]
        types = {
            n: t for n, t in ({"logits": f"*{logits}"} | pointers | numbers).items() if n in names and n not in absent
        }
        known = {n: v for n, v in constants.items() if n in names} | dict.fromkeys(absent)
        often = logits == "fp32" and parts == 32 and (not without or name == "survey-greedy-fp32-32-bare")
        return Ahead(
            name, kernel, types, known, warps, divisible=("stride", "mask_stride", "vocab"), often=often
        )  # fmt: skip

    yield Ahead(
        "edit",
        _edit,
        {
            "logits": "*fp32", "stride": "i32", "ends": "*i32", "ids": "*i32", "factors": "*fp32", "adds": "*fp32",
        },
        {"EDITORS": _EDITORS, "BLOCK": 128},
        divisible=("stride",),
    )  # fmt: skip
    unmasked = ("masks", "mask_rows")
    unfiltered = ("top_k", "top_p", "min_p", "tally")
    greedy = (*unfiltered, "temperature", "chances", "part_sum")
    for logits, parts, bare in (
        (logits, parts, bare)
        for logits in ("fp32", "bf16", "fp16") for parts in (32, 65) for bare in ((), unmasked) if logits == "fp32" or not bare
    ):  # fmt: skip
        size = f"{logits}-{parts}{'-bare' if bare else ''}"
        for kind, less in (("", ()), ("-drawn", unfiltered), ("-greedy", greedy)):
            yield ahead(f"survey{kind}-{size}", _survey, logits, 8, parts, (*bare, *less))
            yield ahead(f"settle{kind}-{size}", _settle, logits, 8, parts, (*bare, *less))
        yield ahead(f"tally-{size}", _tally, logits, 8, parts, bare)
        yield ahead(f"gather-{size}", _gather, logits, 8, parts, bare)
        yield ahead(f"select-{size}", _select, logits, 4, parts, bare, WHOLE=False)
        yield ahead(f"select-whole-{size}", _select, logits, 16, parts, bare, WHOLE=True)
