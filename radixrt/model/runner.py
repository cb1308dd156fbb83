"""ModelRunner owns the weights and the KV memory of one model on one device, and runs batches on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.model.checkpoint import Checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.decoder import Decoder, load_decoder
from radixrt.model.device import Device, InlineDevice, StreamDevice, ThreadDevice, upload
from radixrt.model.draw import Drawer, QueuedDraw, queue_draw
from radixrt.model.gguf_names import ARCHITECTURES
from radixrt.model.graphs import DecodeGraphs, FixedPlans, StepPlan, graph_sizes, record_cuda
from radixrt.model.hooked_decoder import HookedDecoder, is_hooked, load_hooked
from radixrt.model.kv_store import KVStore, bytes_per_token, pages_together
from radixrt.model.memory import pool_tokens, step_bytes
from radixrt.model.native_decoder import UNSETTLED, NativeDecoder
from radixrt.model.rope import longest_context
from radixrt.ops.interface import IntArray
from radixrt.ops.load import cores, default_dtype, free_memory, load_ops, use_threads
from radixrt.ops.native import native
from radixrt.ops.torch.ops import TorchOps
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.sampler import Sampled, chosen
from radixrt.sampling.spec import Row
from radixrt.sampling.wishes import wishes_of

log = logging.getLogger("radixrt")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, "int16": torch.int16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_DEFAULT_POOL_LIMIT = 262144
_MOST_RECORDED = 256  # decodes of a step that is recorded


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and what was decided from the settings and the memory at hand."""

    name: str
    family: str
    parameters: int
    dtype: str
    kv_dtype: str
    vocab_size: int
    context_length: int  # longest prompt + output, tokens
    pool_tokens: int
    page_size: int
    kv_bytes_per_token: int
    threads: int
    device: str
    kernels: str = "torch"  # what computes it: torch, a variant of the native kernels, triton, or transformers


class ModelRunner:
    """Runs a model over paged KV.

    Args:
        config: the settings; dtype, pool size and context are decided here.
        checkpoint: the opened model files.
        progress: called with layers loaded and layers in all.

    Raises:
        ModelError: the model is broken or of an unknown family.
        InvalidRequest: a setting that the model or the machine cannot honour.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        threads = config.threads or cores()
        model = None if is_hooked(checkpoint) else _family_config(checkpoint)
        raw = checkpoint.config
        own = (raw.get("dtype") or raw.get("torch_dtype")) if model is None else model.torch_dtype
        dtype = self._dtype(config.dtype, default_dtype() or self._own_dtype(own))
        self.ops = load_ops(dtype, reference=config.kernels == "torch")
        hooked: HookedDecoder | None = None
        if model is None:  # how its keys and values are is known when it has run
            use_threads(threads)
            hooked = load_hooked(checkpoint, self.ops, dtype)
            model = hooked.config
            progress(model.num_layers, model.num_layers)
        self.model = model
        runs_native = self._runs_native(config, model)
        # where native kernels have a pool of threads, a second one of torch's would only be in their way
        used = use_threads(1 if runs_native else threads)
        threads = threads if runs_native else used
        kv_dtype = self._dtype(config.kv_dtype, torch.int16 if runs_native else dtype)
        if kv_dtype in (torch.int8, torch.int16) and not runs_native:
            raise InvalidRequest(
                "kv_dtype", f"={config.kv_dtype}: only the native CPU kernels compute with it, and they do not run here"
            )
        if kv_dtype is torch.float8_e4m3fn and (runs_native or hooked is not None):
            raise InvalidRequest("kv_dtype", "=fp8: neither the native CPU kernels nor transformers compute with it")
        per_token = bytes_per_token(model, dtype, kv_dtype)
        most = longest_context(model)
        if config.max_model_len is not None and config.max_model_len > most:
            raise InvalidRequest("max_model_len", f"={config.max_model_len}: the model's positions end at {most}")
        max_len = config.max_model_len or model.max_position
        tokens = config.max_total_tokens
        loaded: Decoder | None = None
        if tokens is None and hooked is None and self.ops.device.type == "cuda":
            loaded = self._load(checkpoint, dtype, max_len, progress)
            tokens = self._profiled(loaded, config, dtype, kv_dtype, per_token)
        if tokens is None:
            free = int(free_memory(self.ops.device) * config.kv_memory_fraction)
            tokens = min(_DEFAULT_POOL_LIMIT, free // per_token)
        pages = tokens // config.page_size
        if pages < 1:
            field = "kv_memory_fraction" if config.max_total_tokens is None else "max_total_tokens"
            problem = f"={getattr(config, field)}: the pool must hold at least one page of {config.page_size}"
            raise InvalidRequest(field, f"{problem}, not {tokens} tokens")
        if config.max_model_len is not None and config.max_model_len > pages * config.page_size:
            raise InvalidRequest(
                "max_model_len", f"={config.max_model_len}: the pool holds max_total_tokens={pages * config.page_size}"
            )
        slots = pages * config.page_size
        max_len = min(max_len, slots)
        memory = _memory(self.ops.device)
        if slots * per_token > memory:  # a CPU would promise it and fail in the middle of the work
            raise InvalidRequest(
                "max_total_tokens",
                f"={slots}: takes {slots * per_token / 1e9:,.1f} GB, this machine has {memory / 1e9:,.1f} GB "
                f"({per_token} bytes a token)",
            )
        try:
            spare = int(self.ops.device.type == "cuda")  # a slot that padding writes to
            self.store = KVStore(model, slots + spare, dtype, kv_dtype, self.ops.device, by_head=runs_native)
        except (MemoryError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "out of memory"
            raise InvalidRequest(
                "max_total_tokens", f"={slots}: the {slots * per_token / 1e9:,.1f} GB cannot be had ({shown(reason)})"
            ) from None
        self.decoder: Decoder | NativeDecoder | HookedDecoder
        try:
            if hooked is not None:
                self.decoder = hooked
            elif runs_native:
                self.decoder = NativeDecoder(model, checkpoint, self.store, max_len, threads, progress=progress)
            else:
                self.decoder = loaded or self._load(checkpoint, dtype, max_len, progress)
        except MemoryError as error:
            raise ModelError(f"{checkpoint.name}: does not fit into memory ({shown(str(error))})") from None
        if config.compile:
            self._compile(self.decoder)
        self._graphs = self._record(config, max_len) if config.cuda_graphs else None
        self.pages, self.cluster = pages, pages_together(kv_dtype, config.page_size)
        self.ahead = config.overlap if config.overlap is not None else self.ops.device.type == "cuda"
        self.device: Device
        if self.ops.device.type == "cuda":
            self.device = StreamDevice(self.ops.device)
        else:
            self.device = ThreadDevice() if self.ahead else InlineDevice()
        self.info = ModelInfo(
            name=checkpoint.name,
            family=model.family.name,
            parameters=self.decoder.parameters,
            dtype=str(dtype).removeprefix("torch."),
            kv_dtype=str(kv_dtype).removeprefix("torch."),
            vocab_size=model.vocab_size,
            context_length=max_len,
            pool_tokens=slots,
            page_size=config.page_size,
            kv_bytes_per_token=per_token,
            threads=threads,
            device=str(self.ops.device),
            kernels=self._kernels(),
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: IntArray | torch.Tensor,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
    ) -> None:
        """Compute one flattened batch; see ``ForwardBatch`` for the arrays, and ``fill_in`` for tokens on the device."""
        if isinstance(self.decoder, NativeDecoder):
            assert not isinstance(token_ids, torch.Tensor)
            self.decoder.forward(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots)
        elif self._graphs is None or not self._graphs.run(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots):
            self.decoder.forward(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots, self.store)

    def fill_in(
        self, token_ids: IntArray, sources: IntArray, sampled: IntArray | torch.Tensor
    ) -> IntArray | torch.Tensor:
        """``token_ids`` with ``sampled[sources]`` in place of those that have a source (``>= 0``): where ``sampled`` is."""
        if not isinstance(sampled, torch.Tensor):
            return np.where(sources >= 0, sampled[sources], token_ids)
        both = np.stack((token_ids, sources))
        known, rows = upload(both, torch.empty(both.shape, dtype=torch.int32, device=sampled.device))
        return torch.where(rows >= 0, sampled[rows.clamp(min=0)], known)

    @torch.inference_mode()
    def logits(self, slots: IntArray) -> torch.Tensor:
        """Logits that follow the tokens in ``slots``, float32 ``[R, vocab]``."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.logits(slots)
        rows = upload(slots, torch.empty(slots.shape, dtype=torch.int32, device=self.ops.device))
        return self.decoder.logits(self.store.hidden.index_select(0, rows))

    @torch.inference_mode()
    def draw(self, slots: IntArray, rows: Sequence[Row], allowed: Sequence[Bitmask | None]) -> list[Sampled | None]:
        """The token that follows each slot, among the allowed ones (``None``: all), for rows that want no log-probabilities.

        ``None`` in place of one: that row is drawn from its full logits, see ``sample``.
        """
        if isinstance(self.decoder, NativeDecoder):
            ids, values = self.decoder.draw(slots, wishes_of(rows, self.info.vocab_size), allowed)
            drawn: list[Sampled | None] = [*chosen(ids, values)]
            for row in np.flatnonzero(ids == UNSETTLED).tolist():
                drawn[row] = None
            return drawn
        return [None] * len(rows)

    @torch.inference_mode()
    def queue_draw(self, slots: IntArray, rows: Sequence[Row], allowed: Sequence[Bitmask | None]) -> QueuedDraw | None:
        """Like ``draw``, without waiting for the device; ``None``: the operations here cannot, or a row wants log-probabilities."""
        if isinstance(self.decoder, NativeDecoder) or not isinstance(self.ops, Drawer):
            return None
        if not rows or any(row.spec.params.logprobs is not None for row in rows):
            return None
        return queue_draw(self.ops, self.logits(slots), wishes_of(rows, self.info.vocab_size), allowed)

    def _kernels(self) -> str:
        if isinstance(self.decoder, NativeDecoder):
            return f"native {self.decoder.kernels}"
        return (
            "transformers"
            if isinstance(self.decoder, HookedDecoder)
            else "torch"
            if isinstance(self.ops, TorchOps)
            else "triton"
        )

    def _load(
        self, checkpoint: Checkpoint, dtype: torch.dtype, max_len: int, progress: Callable[[int, int], None]
    ) -> Decoder:
        try:
            return load_decoder(self.model, checkpoint, self.ops, dtype, max_len, progress)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(f"{checkpoint.name}: does not fit into memory ({shown(str(error))})") from None

    @torch.inference_mode()
    def _profiled(
        self, decoder: Decoder, config: EngineConfig, dtype: torch.dtype, kv_dtype: torch.dtype, per_token: int
    ) -> int:
        """Tokens of the pool of a GPU, measured with the largest step: a prompt's longest chunk, and logits of a full batch."""
        count = min(config.chunked_prefill_size, config.max_model_len or self.model.max_position)
        store = KVStore(self.model, count, dtype, kv_dtype, self.ops.device)
        places, length = np.arange(count, dtype=np.int32), np.array([count], dtype=np.int32)

        def step() -> None:
            decoder.forward(np.zeros_like(places), places, places, length, length, places, store)
            decoder.logits(store.hidden[:1].expand(config.max_running_requests, -1))

        peak = step_bytes(self.ops.device, step)
        free = free_memory(self.ops.device) + sum(t.nbytes for t in (*store.k, *store.v, store.hidden))
        return pool_tokens(free, peak, config.kv_memory_fraction, per_token, _DEFAULT_POOL_LIMIT)

    def _compile(self, decoder: Decoder | NativeDecoder | HookedDecoder) -> None:
        """Have torch compile the decoder; an error where it cannot."""
        if not isinstance(decoder, Decoder):
            reason = "the native kernels compute here; set kernels=torch"
            if isinstance(decoder, HookedDecoder):
                reason = f"the {self.model.family.name} family is computed by transformers"
            raise InvalidRequest("compile", f"=True: {reason}")
        try:
            torch.compile(lambda x: x + 1)(torch.zeros(2, device=self.ops.device))
        except Exception as error:  # whatever a missing compiler raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InvalidRequest("compile", f"=True: torch cannot compile here ({shown(reason, 200)})") from None
        decoder.compute = torch.compile(decoder.compute, dynamic=True)  # type: ignore[method-assign]

    @torch.inference_mode()
    def _record(self, config: EngineConfig, max_len: int) -> DecodeGraphs[StepPlan] | None:
        """The decode steps as CUDA graphs, where the operations can plan attention at fixed addresses."""
        decoder, ops, model = self.decoder, self.ops, self.model
        if not isinstance(ops, FixedPlans) or not isinstance(decoder, Decoder) or ops.device.type != "cuda":
            return None

        def plans(size: int, keys: int) -> dict[int | None, StepPlan]:
            made: dict[int | None, StepPlan] = {}
            for window in decoder.windows:
                beside = next(iter(made.values()), None)
                made[window] = ops.fixed_plan(size, keys, model.num_heads, model.num_kv_heads, window, beside)
            return made

        return DecodeGraphs(
            graph_sizes(min(config.max_running_requests, _MOST_RECORDED)),
            max_len,
            len(self.store.hidden) - 1,
            self.ops.device,
            plans,
            lambda tokens, positions, slots, at: decoder.compute(tokens, positions, slots, at, self.store),
            record_cuda(self.ops.device),
        )

    def _runs_native(self, config: EngineConfig, model: ModelConfig) -> bool:
        """Whether the native kernels compute; an error where they are asked for and cannot."""
        reason = ""
        if config.kernels == "torch":
            return False
        if self.ops.device.type != "cpu":
            reason = f"the model runs on {self.ops.device.type}"
        elif config.dtype not in ("auto", "float32"):
            reason = f"dtype={config.dtype} is computed by torch; native kernels compute in float32"
        elif model.native_gap:
            reason = model.native_gap
            if config.kernels == "auto":
                log.info("native kernels: %s; the torch reference computes, which is slower", reason)
        elif native is None or native.variants()[0] == "portable":
            reason = "they were not built, a C++ compiler was missing" if native is None else "none for this CPU"
            if config.kernels == "auto":
                log.warning("native kernels: %s; the torch reference computes, which is slower", reason)
        if reason and config.kernels == "native":
            raise InvalidRequest("kernels", f"=native: {reason}")
        return not reason

    @staticmethod
    def _dtype(name: str, default: torch.dtype) -> torch.dtype:
        return default if name == "auto" else _KV_DTYPES[name]

    @staticmethod
    def _own_dtype(name: object) -> torch.dtype:
        name = name or "float32"
        if not isinstance(name, str) or name not in _DTYPES:
            raise ModelError(f"dtype={shown(name)} of the model is not supported; supported: {', '.join(_DTYPES)}")
        return _DTYPES[name]


def _family_config(checkpoint: Checkpoint) -> ModelConfig:
    if checkpoint.format == "gguf" and len(checkpoint.config) == 1:  # its name is all that was made of it
        kind = checkpoint.config.get("model_type")
        raise ModelError(
            f"{checkpoint.name}: GGUF files of architecture {shown(kind)} are not supported; supported: "
            f"{', '.join(ARCHITECTURES)} (other families: as safetensors)"
        )
    return ModelConfig.from_dict(checkpoint.config, checkpoint.name)


def _memory(device: torch.device) -> int:
    """Bytes of memory a device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)
