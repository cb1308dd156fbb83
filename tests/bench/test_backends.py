"""Our engine and ``transformers.generate`` on the same workloads: same tokens, and our cache reaches the optimum."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from radixrt import Engine
from radixrt.bench.backends import RadixBackend, TransformersBackend, load_transformers
from radixrt.bench.cli import bench
from radixrt.bench.runner import compare, run
from radixrt.bench.workloads import WORKLOADS, Node, Workload, build
from radixrt.errors import ModelError

SCALE = 0.12


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), max_total_tokens=20_000, threads=1, check_integrity=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def peer(tiny_model: Path) -> TransformersBackend:
    return TransformersBackend.from_checkpoint(tiny_model, threads=1)


def made(engine: Engine, name: str) -> Workload:
    return build(name, lambda text: engine.tokenizer.encode(text, add_special=False), scale=SCALE)


@pytest.mark.parametrize("name", WORKLOADS)
def test_same_tokens_and_the_optimal_hit_rate(engine: Engine, peer: TransformersBackend, name: str) -> None:
    found = compare(made(engine, name), [RadixBackend(engine), peer], repeats=1)
    same, of = found.same_outputs("transformers")
    assert same == of, f"{of - same} of {of} requests differ from transformers"
    ours, theirs = found.results["radixrt"][0], found.results["transformers"][0]
    assert ours.hit_rate == ours.optimal_hit_rate == ours.reported_optimal_hit_rate
    assert theirs.hit_rate == 0.0
    assert theirs.optimal_hit_rate == ours.optimal_hit_rate
    assert (ours.prompt_tokens, ours.generated_tokens) == (theirs.prompt_tokens, theirs.generated_tokens)


def test_the_cache_changes_the_hit_rate_and_nothing_else(engine: Engine, tiny_model: Path) -> None:
    workload = made(engine, "tree-of-thought")
    with Engine(str(tiny_model), max_total_tokens=20_000, threads=1, disable_radix_cache=True) as off:
        plain = run(workload, RadixBackend(off))
    cached = run(workload, RadixBackend(engine))
    assert cached.outputs == plain.outputs
    assert plain.hit_rate == 0.0 < cached.hit_rate


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_peer_answers_the_same_at_every_batch_size(engine: Engine, peer: TransformersBackend, size: int) -> None:
    workload = made(engine, "unshared")
    other = TransformersBackend(peer._model, threads=1, batch_size=size)
    assert other.batch_size(workload) == min(size, workload.concurrency or size)
    other.prepare(workload)
    assert run(workload, other).outputs == run(workload, peer).outputs
    assert not other.calibration, "a fixed batch size was calibrated"


def test_the_peer_pads_prompts_of_different_lengths(engine: Engine, peer: TransformersBackend) -> None:
    tokens = made(engine, "few-shot").nodes[0].tokens
    lengths = (3, 40, 17, 1)
    workload = Workload("mixed", "", tuple(Node(f"m{n}", tokens[:n], 6) for n in lengths))
    padded = TransformersBackend(peer._model, threads=1, batch_size=len(lengths))
    alone = TransformersBackend(peer._model, threads=1, batch_size=1)
    assert run(workload, padded).outputs == run(workload, alone).outputs == run(workload, RadixBackend(engine)).outputs


def test_the_peer_keeps_the_batch_size_that_took_least_time_per_request(
    engine: Engine, peer: TransformersBackend
) -> None:
    other = TransformersBackend(peer._model, threads=1)
    workload = made(engine, "few-shot")
    other.prepare(workload)
    seen = other.calibration["few-shot"]
    assert other.batch_size(workload) == min(seen, key=seen.__getitem__)
    assert set(seen) <= {1, 4, len(workload.nodes)}


def test_peer_has_the_checkpoints_weights(tiny_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    loaded = load_transformers(tiny_model).state_dict()
    assert original.keys() == loaded.keys()
    assert all(torch.equal(original[name], loaded[name]) for name in original)


def test_peer_refuses_a_checkpoint_it_cannot_fill(tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    tensors = load_file(tiny_model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_transformers(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    with pytest.raises(ModelError, match="'nonesuch'"):
        load_transformers(tmp_path)


def test_bench_command_runs_prints_and_writes(tiny_model: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=250)
    settings = {"model": str(tiny_model), "max_total_tokens": 20_000, "threads": 1}
    file = tmp_path / "runs.json"
    bench(
        ["few-shot", "single-stream"],
        settings,
        peers=["transformers"],
        repeats=1,
        scale=SCALE,
        console=console,
        json_file=file,
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("few-shot", "single-stream", "radixrt", "transformers", "threads, torch"):
        assert part in text
    read = json.loads(file.read_text())
    assert [found["name"] for found in read["workloads"]] == ["few-shot", "single-stream"]
    assert read["workloads"][1]["runs"]["transformers"][0]["ttft_s"] > 0
    few = read["workloads"][0]
    assert few["same_outputs"] == {"transformers": few["runs"]["radixrt"][0]["requests"]}


def test_cache_on_and_off_are_compared(tiny_model: Path) -> None:
    console = Console(file=io.StringIO(), width=250)
    settings = {"model": str(tiny_model), "max_total_tokens": 20_000, "threads": 1}
    [found], _judged = bench(["few-shot"], settings, repeats=2, scale=SCALE, cache_ab=True, console=console)
    assert found.backends == ["cache on", "cache off"]
    assert found.same_outputs("cache off")[0] == len(found.workload.nodes)
    assert found.median("cache on", "hit_rate") == found.median("cache on", "optimal_hit_rate")
    assert found.median("cache off", "hit_rate") == 0.0
