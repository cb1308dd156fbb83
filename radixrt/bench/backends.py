"""Owns how each engine runs a workload: ``RadixBackend`` on ours, ``TransformersBackend`` on ``transformers.generate``.

Invariants: both are fed the same token ids and generate greedily with end of sequence ignored; the peer gets the same
weights, in the same process, with the same number of torch threads, and the batch size that suits it best.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from radixrt.bench.runner import Execution
from radixrt.bench.workloads import Node, Tokens, Workload
from radixrt.errors import ModelError, RadixrtError
from radixrt.request import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    import torch

BATCH_SIZES = (1, 4, 8, 16, 48)


class RadixBackend:
    """Our engine, driven by ``add`` and ``step``: a request is added in the step in which its parent finishes."""

    def __init__(self, engine: Any, *, name: str = "radixrt") -> None:
        self.name = name
        self._engine = engine

    def prepare(self, workload: Workload) -> None:
        self._run(_first(workload, 4, max_tokens=4))

    def execute(self, workload: Workload) -> Execution:
        return self._run(workload)

    def close(self) -> None:
        self._engine.close()

    def _run(self, workload: Workload) -> Execution:
        engine = self._engine
        engine.flush_cache()
        engine.reset_stats()
        children = workload.children()
        ready = deque(children[None])
        limit = workload.concurrency or len(workload.nodes)
        running: dict[str, Node] = {}
        started: dict[str, float] = {}
        prompts: dict[str, Tokens] = {}
        outputs: dict[str, Tokens] = {}
        ttft: dict[str, float] = {}
        while ready or running:
            while ready and len(running) < limit:
                node = ready.popleft()
                prompts[node.id] = workload.prompt(node, prompts, outputs)
                started[node.id] = time.perf_counter()
                params = SamplingParams(max_tokens=node.max_tokens, temperature=0.0, ignore_eos=True)
                running[engine.add(list(prompts[node.id]), params)] = node
            if not engine.has_work:
                raise RadixrtError(f"{self.name}: {workload.name} stalled with {len(running)} requests unanswered")
            for delta in engine.step():
                node = running[delta.request_id]
                if node.id not in ttft and delta.token_ids:
                    ttft[node.id] = time.perf_counter() - started[node.id]
                if delta.output is not None:
                    if delta.output.error is not None:
                        raise RadixrtError(
                            f"{self.name}: request {node.id} of {workload.name} failed: {delta.output.error}"
                        )
                    del running[delta.request_id]
                    outputs[node.id] = tuple(delta.output.token_ids)
                    ready.extend(children.get(node.id, ()))
        stats = engine.stats()
        return Execution(prompts, outputs, stats.computed_tokens, ttft, stats.optimal_hit_rate)


class TransformersBackend:
    """``transformers.generate`` with static, left-padded batches of the size that suits the workload best.

    A batch holds requests of one stage with the same ``max_tokens``. Attention is torch's SDPA, under
    ``inference_mode``. The model's own generation settings are replaced. ``batch_size``: use this one instead of
    calibrating.
    """

    name = "transformers"

    def __init__(
        self, model: Any, *, pad_token_id: int = 0, threads: int | None = None, batch_size: int | None = None
    ) -> None:
        from transformers import GenerationConfig

        self._model = model.eval()
        # generate() fills what a call leaves open from the model's own settings, end-of-sequence ids among them.
        self._model.generation_config = GenerationConfig(pad_token_id=pad_token_id)
        self._pad = pad_token_id
        self._threads = threads
        self._fixed = batch_size
        self._best: dict[str, int] = {}
        self.calibration: dict[str, dict[int, float]] = {}  # workload -> batch size -> seconds per request

    @classmethod
    def from_checkpoint(
        cls, path: Path, *, dtype: torch.dtype | None = None, threads: int | None = None, batch_size: int | None = None
    ) -> TransformersBackend:
        """The same weights as ours: the checkpoint's tensors (a GGUF's dequantized) in a transformers model."""
        return cls(load_transformers(path, dtype), threads=threads, batch_size=batch_size)

    def prepare(self, workload: Workload) -> None:
        self._set_threads()
        self._generate([_filler(workload.nodes[0], 16)], 4)  # the first use of every kernel is not measured
        if self._fixed is None and workload.name not in self._best:
            self._best[workload.name] = self._calibrate(workload)

    def batch_size(self, workload: Workload) -> int:
        """The batch size used for ``workload``: fixed, calibrated, or all that may run at once."""
        size = self._fixed or self._best.get(workload.name) or _widest(workload)
        return min(size, workload.concurrency or size)

    def execute(self, workload: Workload) -> Execution:
        self._set_threads()
        prompts: dict[str, Tokens] = {}
        outputs: dict[str, Tokens] = {}
        ttft: dict[str, float] = {}
        size = self.batch_size(workload)
        for stage in workload.stages():
            submitted = time.perf_counter()
            for node in stage:
                prompts[node.id] = workload.prompt(node, prompts, outputs)
            for batch in _batches(stage, size):
                clock = _FirstToken() if size == 1 else None  # transformers streams batches of one only
                made = self._generate([prompts[node.id] for node in batch], batch[0].max_tokens, clock)
                for node, tokens in zip(batch, made, strict=True):
                    outputs[node.id] = tokens
                if clock is not None and clock.at is not None:
                    ttft[batch[0].id] = clock.at - submitted
        return Execution(prompts, outputs, sum(len(tokens) for tokens in prompts.values()), ttft)

    def close(self) -> None:
        self._model = None

    def _set_threads(self) -> None:
        import torch

        if self._threads is not None and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def _calibrate(self, workload: Workload) -> int:
        """The batch size with the least time per request, on requests shaped like those of the widest stage.

        Time per request falls, then rises with the batch; the search ends at the first size that is clearly worse.
        """
        stage = max(workload.stages(), key=len)
        lengths = workload.prompt_lengths()
        most = min(len(stage), workload.concurrency or len(stage))
        sizes = [size for size in BATCH_SIZES if size < most] + [most]
        seen = self.calibration.setdefault(workload.name, {})
        if len(sizes) == 1:
            return sizes[0]
        for size in sizes:
            nodes = stage[:size]
            prompts = [_filler(node, lengths[node.id]) for node in nodes]
            start = time.perf_counter()
            self._generate(prompts, max(node.max_tokens for node in nodes))
            seen[size] = (time.perf_counter() - start) / size
            if seen[size] > 1.05 * min(seen.values()):
                break
        return min(seen, key=seen.__getitem__)

    def _generate(self, prompts: Sequence[Tokens], max_tokens: int, clock: _FirstToken | None = None) -> list[Tokens]:
        """Greedy outputs of one left-padded batch."""
        import torch
        from transformers import GenerationConfig

        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self._pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        how = GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, num_beams=1, use_cache=True, pad_token_id=self._pad
        )
        with torch.inference_mode():
            made = self._model.generate(ids, attention_mask=mask, generation_config=how, streamer=clock)
        return [tuple(row) for row in made[:, longest:].tolist()]


class _FirstToken:
    """A ``transformers`` streamer that only notes when the first generated token arrives (the prompt comes first)."""

    def __init__(self) -> None:
        self._puts = 0
        self.at: float | None = None

    def put(self, value: Any) -> None:
        self._puts += 1
        if self._puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def load_transformers(path: Path, dtype: torch.dtype | None = None) -> Any:
    """A ``transformers`` causal language model with the weights of a radixrt checkpoint, float32 unless told.

    Raises:
        ModelError: transformers is not installed, does not know the architecture, or the tensors do not match it.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ModelError(f"the peer needs transformers: pip install transformers ({error})") from error
    from radixrt.model.checkpoint import open_checkpoint

    dtype = dtype or torch.float32
    checkpoint = open_checkpoint(path)
    try:
        settings = dict(checkpoint.config)
        family = settings.pop("model_type", "llama")
        settings.pop("torch_dtype", None)
        settings.pop("dtype", None)
        try:
            config = AutoConfig.for_model(family, **settings)
        except ValueError as error:
            raise ModelError(f"{path}: transformers does not know the architecture {family!r}") from error
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        weights = {name: checkpoint.tensor(name, dtype) for name in checkpoint.names()}
        wanted = set(model.state_dict())
        # A tied head shares the embedding; rotary tables are computed by both sides.
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        missing = wanted - set(weights) - tied
        unexpected = {name for name in set(weights) - wanted if "rotary" not in name}
        if missing or unexpected:
            raise ModelError(
                f"{path}: tensors do not fit transformers' {type(model).__name__}: "
                f"missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
            )
        model.load_state_dict({name: weights[name] for name in wanted & set(weights)}, strict=False)
        model.tie_weights()
        return model.eval()
    finally:
        checkpoint.close()


def _batches(stage: Sequence[Node], size: int) -> list[list[Node]]:
    """The stage in batches of at most ``size``, all of one batch with the same ``max_tokens``."""
    groups: dict[int, list[Node]] = {}
    for node in stage:
        groups.setdefault(node.max_tokens, []).append(node)
    return [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]


def _widest(workload: Workload) -> int:
    return max(len(stage) for stage in workload.stages())


def _filler(node: Node, length: int) -> Tokens:
    """A prompt of ``length`` tokens made of the node's own, to time a request before its parents have run."""
    return (node.tokens * (length // len(node.tokens) + 1))[:length]


def _first(workload: Workload, count: int, *, max_tokens: int) -> Workload:
    """The first few roots with short outputs: a warm-up that touches every kernel the workload needs."""
    roots = [node for node in workload.nodes if node.parent is None][:count]
    nodes = tuple(Node(node.id, node.tokens, min(node.max_tokens, max_tokens)) for node in roots)
    return Workload(workload.name, workload.about, nodes, workload.concurrency)
