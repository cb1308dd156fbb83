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
from radixrt.model.gguf_names import ARCHITECTURES
from radixrt.model.hooked_decoder import HookedDecoder, is_hooked, load_hooked
from radixrt.model.kv_store import KVStore, bytes_per_token
from radixrt.model.native_decoder import UNSETTLED, NativeDecoder
from radixrt.model.rope import longest_context
from radixrt.ops.interface import IntArray
from radixrt.ops.load import cores, default_dtype, free_memory, load_ops, use_threads
from radixrt.ops.native import native
from radixrt.sampling.mask import Bitmask
from radixrt.sampling.sampler import Sampled, chosen
from radixrt.sampling.spec import Row
from radixrt.sampling.wishes import wishes_of

log = logging.getLogger("radixrt")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8}
_DEFAULT_POOL_LIMIT = 262144


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
    kernels: str = "torch"  # what computes it: torch, or a variant of the native kernels


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
        kv_dtype = self._dtype(config.kv_dtype, torch.float16 if runs_native else dtype)
        if kv_dtype is torch.int8 and not runs_native:
            raise InvalidRequest(
                "kv_dtype", "=int8: only the native CPU kernels compute with it, and they do not run here"
            )
        per_token = bytes_per_token(model, dtype, kv_dtype)
        most = longest_context(model)
        if config.max_model_len is not None and config.max_model_len > most:
            raise InvalidRequest("max_model_len", f"={config.max_model_len}: the model's positions end at {most}")
        max_len = config.max_model_len or model.max_position
        tokens = config.max_total_tokens
        if tokens is None:
            free = int(free_memory(self.ops.device) * config.kv_memory_fraction)
            tokens = min(_DEFAULT_POOL_LIMIT, free // per_token)
        pages = tokens // config.page_size
        if pages < 1:
            raise InvalidRequest(
                "max_total_tokens", f"={tokens}: the pool must hold at least one page of {config.page_size}"
            )
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
            self.store = KVStore(model, slots, dtype, kv_dtype, self.ops.device, by_head=runs_native)
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
                self.decoder = load_decoder(model, checkpoint, self.ops, dtype, max_len, progress)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(f"{checkpoint.name}: does not fit into memory ({shown(str(error))})") from None
        self.pages = pages
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
            kernels=f"native {self.decoder.kernels}"
            if isinstance(self.decoder, NativeDecoder)
            else "torch"
            if hooked is None
            else "transformers",
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: IntArray,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
    ) -> None:
        """Compute one flattened batch; see ``ForwardBatch`` for the arrays."""
        if isinstance(self.decoder, NativeDecoder):
            self.decoder.forward(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots)
        else:
            self.decoder.forward(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots, self.store)

    @torch.inference_mode()
    def logits(self, slots: IntArray) -> torch.Tensor:
        """Logits that follow the tokens in ``slots``, float32 ``[R, vocab]``."""
        if isinstance(self.decoder, NativeDecoder):
            return self.decoder.logits(slots)
        return self.decoder.logits(self.store.hidden.index_select(0, torch.from_numpy(slots).to(self.ops.device)))

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
