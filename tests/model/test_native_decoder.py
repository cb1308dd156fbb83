"""The native decoder: what it computes beside the torch reference, and that a request's bits depend on nothing but the request."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.errors import InvalidRequest
from radixrt.model.checkpoint import open_checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.decoder import load_decoder
from radixrt.model.kv_store import KVStore
from radixrt.model.native_decoder import NativeDecoder
from radixrt.model.source import resolve
from radixrt.ops.native import native
from radixrt.ops.torch.ops import TorchOps
from tests.tiny import NATIVE, save_tiny

pytestmark = pytest.mark.skipif(native is None, reason="radixrt was installed without a C++ compiler")

SLOTS = 1024
Ints = npt.NDArray[np.int32]


class Computer:
    """A decoder and its memory; computes sequences whose tokens may come in parts."""

    def __init__(self, path: Path, kind: str = "native", *, kv: torch.dtype = torch.float32, threads: int = 1) -> None:
        checkpoint = open_checkpoint(path)
        config = ModelConfig.from_dict(checkpoint.config)
        self.kind = kind
        self.vocab = config.vocab_size
        self.store = KVStore(config, SLOTS, torch.float32, kv, torch.device("cpu"), by_head=kind == "native")
        if kind == "torch":
            ops = TorchOps(torch.device("cpu"), torch.float32)
            self.torch = load_decoder(config, checkpoint, ops, torch.float32, 512)
        else:
            self.native = NativeDecoder(config, checkpoint, self.store, 512, threads)

    def forward(self, *parts: tuple[Ints, Ints, int]) -> None:
        """Compute parts of sequences in one batch: tokens of the whole sequence, its slots, how many are computed already."""
        arrays = (
            np.concatenate([tokens[done:] for tokens, _, done in parts]),
            np.concatenate([np.arange(done, len(tokens), dtype=np.int32) for tokens, _, done in parts]),
            np.concatenate([slots[done : len(tokens)] for tokens, slots, done in parts]),
            np.array([len(tokens) - done for tokens, _, done in parts], dtype=np.int32),
            np.array([len(tokens) for tokens, _, _ in parts], dtype=np.int32),
            np.concatenate([slots[: len(tokens)] for tokens, slots, _ in parts]),
        )
        if self.kind == "torch":
            with torch.inference_mode():
                self.torch.forward(*arrays, self.store)
        else:
            self.native.forward(*arrays)

    def logits(self, slots: Ints) -> torch.Tensor:
        if self.kind == "torch":
            with torch.inference_mode():
                return self.torch.logits(self.store.hidden[torch.from_numpy(slots).long()])
        return self.native.logits(slots)

    def hidden(self, slots: Ints) -> npt.NDArray[np.float32]:
        return self.store.hidden[torch.from_numpy(slots).long()].numpy().copy()


def sequence(vocab: int, length: int, seed: int) -> tuple[Ints, Ints]:
    """Tokens, and slots in no order."""
    random = np.random.default_rng(seed)
    return random.integers(0, vocab, length).astype(np.int32), random.permutation(SLOTS)[:length].astype(np.int32)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {name: tmp_path_factory.mktemp(name) for name in NATIVE}
    for name, path in paths.items():
        save_tiny(name, path)
    return paths


@pytest.mark.parametrize("name", NATIVE)
def test_logits_are_the_references(models: dict[str, Path], name: str) -> None:
    ours, reference = Computer(models[name]), Computer(models[name], "torch")
    tokens, slots = sequence(ours.vocab, 70, 1)
    for computer in (ours, reference):
        computer.forward((tokens[:50], slots, 0))
        computer.forward((tokens[:51], slots, 50))
        computer.forward((tokens, slots, 51))
    torch.testing.assert_close(ours.logits(slots), reference.logits(slots), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", [torch.float16, torch.bfloat16])
def test_keys_and_values_in_16_bits_of_a_float(models: dict[str, Path], kv: torch.dtype) -> None:
    ours, reference = Computer(models["llama"], kv=kv), Computer(models["llama"], "torch", kv=kv)
    tokens, slots = sequence(ours.vocab, 70, 1)
    for computer in (ours, reference):
        computer.forward((tokens, slots, 0))
    torch.testing.assert_close(ours.logits(slots), reference.logits(slots), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-mha-wide-head"])
@pytest.mark.parametrize("kv, most", [(torch.int8, 1e-2), (torch.int16, 1e-6)])
def test_keys_and_values_in_integers_are_close(
    models: dict[str, Path], name: str, kv: torch.dtype, most: float
) -> None:
    """A scale for each token and head: half a step of 127, and of 2047 or more, of the largest element."""
    ours, exact = Computer(models[name], kv=kv), Computer(models[name])
    tokens, slots = sequence(ours.vocab, 70, 1)
    for computer in (ours, exact):
        computer.forward((tokens, slots, 0))
    p, q = (computer.logits(slots).log_softmax(-1) for computer in (exact, ours))
    assert 0 < float((p.double().exp() * (p.double() - q.double())).sum(-1).mean()) < most


@pytest.mark.model
def test_the_embedded_model_is_close_to_its_dequantized_weights() -> None:
    """Activations have 8 bits: llama.cpp's own distance to float32 on such a file is about as large."""
    ours, reference = Computer(resolve(None), threads=2), Computer(resolve(None), "torch")
    tokens, slots = sequence(ours.vocab, 64, 1)
    for computer in (ours, reference):
        computer.forward((tokens, slots, 0))
    p, q = (computer.logits(slots).log_softmax(-1) for computer in (reference, ours))
    assert float((p.exp() * (p - q)).sum(-1).mean()) < 0.02
    assert float((p.argmax(-1) == q.argmax(-1)).float().mean()) > 0.85


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, torch.dtype, int, list[int], int, list[list[int]]]:
    """A model and its KV, a length of a shared prefix, lengths behind it, threads, and where each sequence is cut."""
    name = draw(st.sampled_from(["llama", "mistral-window", "qwen3", "llama-mha-wide-head"]))
    prefix = draw(st.sampled_from([0, 1, 127, 128, 130, 200]))
    tails = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    cuts = [draw(st.lists(st.integers(1, prefix + tail), max_size=3).map(sorted)) for tail in tails]
    kv = draw(st.sampled_from([torch.float32, torch.float16, torch.int8, torch.int16, torch.int16]))
    return name, kv, prefix, tails, draw(st.sampled_from([1, 3])), cuts


@settings(max_examples=20, deadline=None)
@given(schedules())
def test_a_sequence_has_the_same_bits_in_any_batch(
    models: dict[str, Path], schedule: tuple[str, torch.dtype, int, list[int], int, list[list[int]]]
) -> None:
    """Alone in one piece; beside others that share its prefix, in pieces, on more threads, with and without shared reads."""
    name, kv, prefix, tails, threads, cuts = schedule
    alone = Computer(models[name], kv=kv)
    shared_tokens, shared_slots = sequence(alone.vocab, prefix, 5)
    taken = set(shared_slots.tolist())
    free = np.array([slot for slot in range(SLOTS) if slot not in taken], dtype=np.int32)
    sequences = []
    for index, tail in enumerate(tails):
        tokens, _ = sequence(alone.vocab, tail, 10 + index)
        own = free[index * 40 : index * 40 + tail]
        sequences.append((np.concatenate((shared_tokens, tokens)), np.concatenate((shared_slots, own))))
    expected = []
    for tokens, slots in sequences:
        alone.forward((tokens, slots, 0))
        expected.append(alone.hidden(slots[prefix:]))
    for share in (True, False):
        together = Computer(models[name], kv=kv, threads=threads)
        together.native.share_prefixes(share)
        done = [0] * len(sequences)
        for turn in range(4):
            parts = []
            for index, (tokens, slots) in enumerate(sequences):
                end = cuts[index][turn] if turn < len(cuts[index]) else len(tokens)
                if end > done[index]:
                    parts.append((tokens[:end], slots, done[index]))
                    done[index] = end
            if parts:
                together.forward(*parts)
        for (_, slots), want in zip(sequences, expected, strict=True):
            assert np.array_equal(together.hidden(slots[prefix:]), want)
        rows = np.concatenate([slots[-1:] for _, slots in sequences])
        each = torch.cat([together.logits(rows[i : i + 1]) for i in range(len(rows))])
        assert torch.equal(together.logits(rows), each)


def test_the_likeliest_is_the_first_maximum_of_the_allowed(models: dict[str, Path]) -> None:
    computer = Computer(models["llama"], threads=2)
    tokens, slots = sequence(computer.vocab, 40, 3)
    computer.forward((tokens, slots, 0))
    logits = computer.logits(slots)
    words = (computer.vocab + 31) // 32
    random = np.random.default_rng(0)
    masks = [None if i % 3 == 0 else random.integers(-(2**31), 2**31, words).astype(np.int32) for i in range(40)]
    masks[1] = np.zeros(words, dtype=np.int32)
    masks[2] = np.zeros(words, dtype=np.int32)
    masks[2][3] = 1 << 5
    masks[4] = np.full(words + 2, -1, dtype=np.int32)  # the tokenizer knows more tokens than the model
    ids, values = computer.native.draw(slots, None, masks)
    for row, mask in enumerate(masks):
        allowed = logits[row].numpy().copy()
        if mask is not None:
            allowed[np.unpackbits(mask.view(np.uint8), bitorder="little")[: computer.vocab] == 0] = -np.inf
        assert values[row] == allowed.max()
        assert row == 1 or ids[row] == allowed.argmax()
    assert not np.isfinite(values[1]) and ids[2] == 3 * 32 + 5


def test_a_row_that_is_no_number_stays_alone(models: dict[str, Path]) -> None:
    computer = Computer(models["llama"])
    tokens, slots = sequence(computer.vocab, 3, 3)
    computer.forward((tokens, slots, 0))
    want, _ = computer.native.draw(slots, None, [None] * 3)
    computer.store.hidden[int(slots[1])] = float("nan")
    ids, values = computer.native.draw(slots, None, [None] * 3)
    assert np.isnan(values[1]) and np.isfinite(values[[0, 2]]).all() and (ids[[0, 2]] == want[[0, 2]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.array([10**6], dtype=np.int32)}, "tokens: out of range"),
        ({0: np.array([-1], dtype=np.int32)}, "tokens: out of range"),
        ({1: np.array([512], dtype=np.int32)}, "positions: out of range"),
        ({2: np.array([SLOTS], dtype=np.int32)}, "write_slots: out of range"),
        ({5: np.array([-1], dtype=np.int32)}, "kv_slots: out of range"),
        ({3: np.array([2], dtype=np.int32)}, "out of range"),
        ({3: np.array([0], dtype=np.int32)}, "out of range"),
        ({5: np.array([1, 2], dtype=np.int32)}, "kv_slots: 1 items"),
        ({0: np.array([1], dtype=np.int64)}, "tokens"),
        ({0: np.array([1, 2], dtype=np.int32)}, "positions: 2 items"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    models: dict[str, Path], change: dict[int, npt.NDArray[np.generic]], message: str
) -> None:
    computer = Computer(models["llama"])
    arrays: list[npt.NDArray[np.generic]] = [np.array([v], dtype=np.int32) for v in (1, 0, 3, 1, 1, 3)]
    computer.native.forward(*arrays)  # type: ignore[arg-type]
    for index, value in change.items():
        arrays[index] = value
    with pytest.raises(ValueError, match=message):
        computer.native.forward(*arrays)  # type: ignore[arg-type]


def in_child(method: str, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function`` in a process of its own; an exception or a crash there, or one that hangs, fails here."""
    context: Any = multiprocessing.get_context(method)
    child = context.Process(target=function, args=arguments)
    child.start()
    child.join(60)
    child.kill()
    child.join()
    assert child.exitcode == 0


def compute_and_close(computer: Computer, tokens: Ints, slots: Ints, expected: npt.NDArray[np.float32]) -> None:
    computer.store.hidden.zero_()
    computer.forward((tokens, slots, 0))
    assert np.array_equal(computer.hidden(slots), expected)
    del computer.native  # its threads are the parent's


def test_a_forked_process_computes_and_ends(models: dict[str, Path]) -> None:
    computer = Computer(models["llama"], threads=3)
    tokens, slots = sequence(computer.vocab, 40, 3)
    computer.forward((tokens, slots, 0))
    in_child("fork", compute_and_close, computer, tokens, slots, computer.hidden(slots))


def allow(more: int) -> None:
    """No more than ``more`` bytes of address space beyond what is used; negative: as much as there is."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + more if more >= 0 else limit, limit))


def too_many_threads(path: Path) -> None:
    allow(500 << 20)
    with pytest.raises(InvalidRequest, match="threads=1000: cannot be had"):
        Computer(path, threads=1000)


def no_memory_to_load(path: Path) -> None:
    allow(8 << 20)
    with pytest.raises(MemoryError):
        Computer(path)


def too_little_memory(path: Path) -> None:
    computer = Computer(path, threads=2)
    tokens, slots = sequence(computer.vocab, 40, 3)
    computer.forward((tokens, slots, 0))
    expected = computer.hidden(slots)
    rows = 150_000
    many = [np.full(rows, value, dtype=np.int32) for value in (tokens[0], 0, slots[0], 1, 1, slots[0])]
    failures = 0
    for more in range(1 << 20, 800 << 20, 24 << 20):
        allow(more)
        try:
            computer.native.forward(*many)
            break
        except MemoryError:
            failures += 1
            allow(-1)
            computer.forward((tokens, slots, 0))
            assert np.array_equal(computer.hidden(slots), expected)
    assert 3 < failures < 34


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limit of address space is not known here")
@pytest.mark.parametrize("function", [too_many_threads, no_memory_to_load, too_little_memory])
def test_what_the_system_refuses_is_an_error(models: dict[str, Path], function: Callable[[Path], None]) -> None:
    in_child("spawn", function, models["llama"])


def test_as_many_layers_as_a_config_may_have() -> None:
    layers, size = 4096, 16

    def packed(values: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None = None) -> Any:
        n, k = values.shape
        return native.pack(0, [values], np.zeros(n, dtype=np.int32), np.arange(n, dtype=np.int32), k, bias)

    def ints(*values: int) -> Ints:
        return np.array(values, dtype=np.int32)

    embed = np.random.default_rng(0).standard_normal((20, size)).astype(np.float32)
    ones = np.ones(size, dtype=np.float32)
    zero = packed(np.zeros((size, size), dtype=np.float32))
    step = packed(
        np.zeros((size, size), dtype=np.float32), np.full(size, 1 / 64, dtype=np.float32)
    )  # what a layer adds
    cache, hidden = np.zeros((2, 1, 4, size), dtype=np.float32), np.zeros((4, size), dtype=np.float32)
    model = native.Model(
        "",
        2,
        (size, 1, 1, size, size, 20, 1e-6, 0.25, 0),
        packed(embed),
        packed(embed),
        ones,
        ones,
        1,
        hidden.ctypes.data,
        4,
    )
    keys, values = (one.ctypes.data for one in cache)
    for _ in range(layers):
        model.add_layer(ones, zero, zero, zero, None, None, step, ones, zero, zero, zero, 0, keys, values)
    model.forward(ints(3), ints(0), ints(1), ints(1), ints(1), ints(1))
    x = embed[3] + layers / 64
    np.testing.assert_allclose(hidden[1], x / np.sqrt((x * x).mean() + 1e-6), rtol=1e-4)
