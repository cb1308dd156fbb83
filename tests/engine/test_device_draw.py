"""Tokens that are drawn where the logits are: the next step reads them there, the host a step later. And what torch compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixrt import Engine, InvalidRequest
from radixrt.model.draw import Drawer
from radixrt.model.memory import pool_tokens
from radixrt.sampling.wishes import Wishes
from tests.engine.sim_device import Clock, SimulatedDevice
from tests.engine.test_overlap import MIX, SECONDS, run


def draw(
    logits: torch.Tensor, masks: torch.Tensor | None, mask_rows: torch.Tensor | None, wishes: Wishes | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``Drawer`` asks for, a row at a time."""
    rows, vocab = logits.shape
    tokens, best = torch.zeros(rows, dtype=torch.int32), torch.zeros(rows)
    w: Any = wishes
    for row in range(rows):
        x = logits[row]
        if wishes is not None:
            edits = slice(int(w.edit_end[row - 1]) if row else 0, int(w.edit_end[row]))
            ids = w.edit_ids[edits].long()
            x[ids] = torch.where(x[ids] > 0, x[ids] / w.edit_factor[edits], x[ids] * w.edit_factor[edits])
            x[ids] += w.edit_add[edits]
        if masks is not None and mask_rows is not None and mask_rows[row] >= 0:
            words = masks[mask_rows[row]]
            token = torch.arange(vocab)
            x[(words[token // 32] >> (token % 32)) & 1 == 0] = float("-inf")
        best[row] = x.max()
        if wishes is None or w.temperature[row] == 0:
            tokens[row] = x.argmax()
            continue
        values, order = ((x - best[row]) / w.temperature[row]).exp(), torch.arange(vocab)
        if w.top_k is not None and (w.top_k[row] or w.top_p[row] < 1 or w.min_p[row] > 0):
            values, order = values.sort(descending=True, stable=True)
            values[int(w.top_k[row]) or vocab :] = 0
            before = values.cumsum(0) - values
            kept = (before < w.top_p[row] * values.sum()) & (values >= w.min_p[row] * values[0])
            values = values * kept
        sums = values.double().cumsum(0)
        tokens[row] = order[torch.searchsorted(sums, w.chance[row] * sums[-1], right=True)]
    return tokens, best


def test_tokens_stay_on_the_device_until_the_step_has_ended(make_engine: Callable[..., Engine]) -> None:
    expected = run(make_engine(kernels="torch", overlap=False), MIX)
    engine = make_engine(kernels="torch", overlap=True)
    drawn: list[int] = []

    def counted(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append(len(logits))
        return draw(logits, *args)

    assert not isinstance(engine._runner.ops, Drawer)
    engine._runner.ops.draw = counted  # type: ignore[attr-defined]
    engine._flights.device = SimulatedDevice(Clock(), SECONDS)
    assert run(engine, MIX) == expected
    assert sum(drawn) > 50


def test_a_row_without_a_token_ends_its_request_alone(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(kernels="torch", overlap=True)

    def broken(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if len(logits) == 3:
            logits[1] = torch.nan
        tokens, best = draw(logits.nan_to_num(nan=0.0), *args)
        best[logits.isnan().any(dim=1)] = torch.nan
        return tokens, best

    work = MIX[:2] + MIX[5:6]
    expected = run(make_engine(kernels="torch", overlap=False), work)
    engine._runner.ops.draw = broken  # type: ignore[attr-defined]
    found = run(engine, work)
    assert found[0] == expected[0] and found[2] == expected[2]
    assert [reason.value for _, _, reason, _ in found[1]] == ["error"]


# ---- torch.compile


def test_a_compiled_model_answers_the_same(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(make_engine(kernels="torch"), MIX)
    calls = 0

    def compiled(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    assert run(make_engine(kernels="torch", compile=True), MIX) == expected
    assert calls > 20


def test_what_cannot_be_compiled_is_refused_by_name(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no working C++ compiler\nand more")

    monkeypatch.setattr(torch, "compile", none)
    with pytest.raises(
        InvalidRequest, match=r"^compile=True: torch cannot compile here \('?no working C\+\+ compiler'?\)"
    ):
        make_engine(kernels="torch", compile=True)
    monkeypatch.setattr("radixrt.model.runner.ModelRunner._runs_native", lambda *_: True)
    with pytest.raises(InvalidRequest, match="compile=True: .*kernels=torch"):
        make_engine(compile=True)


# ---- memory


@pytest.mark.parametrize(
    ("free", "step", "fraction", "per_token", "most", "tokens"),
    [
        (1000, 0, 1.0, 10, 500, 100),
        (1000, 0, 0.5, 10, 500, 50),
        (1000, 400, 0.5, 10, 500, 30),
        (1000, 0, 1.0, 10, 60, 60),
        (1009, 0, 1.0, 10, 500, 100),
        (1000, 1000, 1.0, 10, 500, None),
        (1000, 2000, 1.0, 10, 500, None),
        (1000, 0, 0.009, 10, 500, None),
    ],
)
def test_the_pool_gets_its_share_of_what_is_left(
    free: int, step: int, fraction: float, per_token: int, most: int, tokens: int | None
) -> None:
    if tokens is None:
        with pytest.raises(InvalidRequest, match="kv_memory_fraction"):
            pool_tokens(free, step, fraction, per_token, most)
    else:
        assert pool_tokens(free, step, fraction, per_token, most) == tokens
