"""ModelRunner owns the weights and the KV memory of one model on one device, and runs batches on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from radixrt.config import EngineConfig
from radixrt.errors import InvalidRequest, ModelError, shown
from radixrt.model.checkpoint import Checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.decoder import Decoder, load_decoder
from radixrt.model.kv_store import KVStore, bytes_per_token
from radixrt.model.rope import longest_context
from radixrt.ops.interface import IntArray
from radixrt.ops.load import cores, default_dtype, free_memory, load_ops, use_threads

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DEFAULT_POOL_LIMIT = 262144
_LOGIT_ROWS = 64  # rows of full logits held at once where a whole prompt's are needed


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
        model = ModelConfig.from_dict(checkpoint.config, checkpoint.name)
        threads = use_threads(config.threads or cores())
        dtype = self._dtype(config.dtype, default_dtype() or self._own_dtype(model))
        kv_dtype = self._dtype(config.kv_dtype, dtype)
        self.model = model
        self.ops = load_ops(dtype)
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
            self.decoder: Decoder = load_decoder(model, checkpoint, self.ops, dtype, max_len, progress)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ModelError(f"{checkpoint.name}: does not fit into memory ({shown(str(error))})") from None
        try:
            self.store = KVStore(model, slots, dtype, kv_dtype, self.ops.device)
        except (MemoryError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "out of memory"
            raise InvalidRequest(
                "max_total_tokens", f"={slots}: the {slots * per_token / 1e9:,.1f} GB cannot be had ({shown(reason)})"
            ) from None
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
        self.decoder.forward(token_ids, positions, write_slots, q_lens, kv_lens, kv_slots, self.store)

    @torch.inference_mode()
    def logits(self, slots: IntArray) -> torch.Tensor:
        """Logits that follow the tokens in ``slots``, float32 ``[R, vocab]``."""
        return self.decoder.logits(self.store.hidden.index_select(0, torch.from_numpy(slots).to(self.ops.device)))

    def logits_in_parts(self, slots: IntArray) -> Iterator[torch.Tensor]:
        """The same, a few rows at a time, for many slots."""
        for at in range(0, len(slots), _LOGIT_ROWS):
            yield self.logits(slots[at : at + _LOGIT_ROWS])

    @staticmethod
    def _dtype(name: str, default: torch.dtype) -> torch.dtype:
        return default if name == "auto" else _DTYPES[name]

    @staticmethod
    def _own_dtype(model: ModelConfig) -> torch.dtype:
        name = model.torch_dtype or "float32"
        if name not in _DTYPES:
            raise ModelError(f"dtype={shown(name)} of the model is not supported; supported: {', '.join(_DTYPES)}")
        return _DTYPES[name]


def _memory(device: torch.device) -> int:
    """Bytes of memory a device has in all."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total + psutil.swap_memory().total)
