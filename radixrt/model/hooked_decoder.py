"""HookedDecoder: a causal language model of transformers that ``registry`` has no row for, over our paged KV through the attention interface.

Invariants: no code of a checkpoint is run. Nothing but keys and values crosses from one position to another, and attention is what
transformers' own is: both are found out when a model is loaded, from its masks and by computing a few tokens whole, in pieces and in
a batch on the real weights; a model of which that is not so is refused with the reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from radixrt.errors import ModelError, shown
from radixrt.model.checkpoint import Checkpoint
from radixrt.model.config import ModelConfig
from radixrt.model.kv_store import KVStore
from radixrt.model.registry import PARTS, Family, family
from radixrt.ops.interface import IntArray, Ops

_NAME = "radixrt_paged"
_HOOK = "radixrt_hook"  # the attribute of a module that says whose it is
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")  # of layers
# What layers hand on to attention and what does not change its result, or is honoured, beside the mask
_HARMLESS = (
    *("dropout", "position_ids", "cache", "past_key_values", "use_cache", "cache_position", "position_embeddings"),
    *(
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "sliding_window",
        "layer_idx",
    ),
)
_LAYERS = ("full_attention", "sliding_attention", "attention")
_REL = {torch.float32: 1e-3}  # how far logits may be from transformers' own, in parts of their deviation
_HALF = 0.1


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer's attention is, as its first call showed."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    scale: float
    softcap: float | None


@dataclass(frozen=True, slots=True)
class _Batch:
    slots: torch.Tensor
    plans: Mapping[int | None, Any]
    store: KVStore


@dataclass(slots=True)
class _Hook:
    """One model's side of the attention function: its layers in the order they are called, and the batch that is computed now."""

    ops: Ops
    name: str
    length: int
    layers: dict[torch.nn.Module, int] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    batch: _Batch | None = None

    def record(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Any,
        scale: float,
        softcap: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        """Note what the layer is; the result is zeros."""
        if module in self.layers:
            raise ModelError(f"{self.name}: one of its layers attends twice to a token")
        for name, value in others.items():
            if name not in _HARMLESS and (isinstance(value, torch.Tensor) or type(value) in (int, float)):
                raise ModelError(f"{self.name}: its attention has {name}, which paged attention does not")
        if others.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ModelError(f"{self.name}: its attention sees later tokens")
        mask_function = getattr(mask, _HOOK, None)
        if mask_function is None:
            raise ModelError(f"{self.name}: it makes masks of its own, which paged attention does not see")
        if v.shape[-1] > k.shape[-1]:
            raise ModelError(f"{self.name}: its values are wider than its keys")
        self.layers[module] = len(self.layers)
        window = _window(mask_function, self.length, self.name)
        self.calls.append(_Call(q.shape[1], k.shape[1], k.shape[3], v.shape[3], window, scale, softcap))
        return q.new_zeros((*q.shape[:1], q.shape[2], q.shape[1], v.shape[-1]))

    def attend(
        self, module: torch.nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Store the new keys and values ``[1, K, T, D]``, then attend ``q [1, H, T, D]`` to all of each sequence; ``[1, T, H, D]``."""
        batch, index = self.batch, self.layers[module]
        assert batch is not None
        call = self.calls[index]
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        k_cache, v_cache = batch.store.k[index], batch.store.v[index]
        self.ops.store(k_cache, batch.slots, k)
        self.ops.store(v_cache, batch.slots, F.pad(v, (0, call.key_dim - call.value_dim)))
        plan = batch.plans[call.window]
        out = self.ops.attention(q, k_cache, v_cache, plan, call.scale, call.softcap, sinks)
        return out[None, ..., : call.value_dim]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in place of its own attention."""
    hook: _Hook = getattr(module, _HOOK)
    if hook.batch is None:
        scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
        return hook.record(module, query, key, value, attention_mask, scale, softcap, others), None
    return hook.attend(module, query, key, value, s_aux), None


def _mask(*_: Any, mask_function: Callable[..., Any], device: Any = None, **__: Any) -> torch.Tensor:
    """What transformers calls in place of making a mask: it is the function that counts."""
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    setattr(mask, _HOOK, mask_function)
    return mask


def _window(mask_function: Callable[..., Any], length: int, name: str) -> int | None:
    """The sliding window of a mask, ``None`` for a causal one.

    Raises:
        ModelError: it is neither.
    """
    keys = torch.arange(length)
    zero = torch.zeros((), dtype=torch.long)

    def seen(query: int) -> torch.Tensor:
        return torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(length)

    try:
        window = int(seen(length - 1).sum())
        for query in {0, 1, window - 1, window, window + 1, length // 2, length - 1}:
            if 0 <= query < length and not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
                raise ModelError(f"{name}: its masks are neither causal nor those of a sliding window")
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"{name}: its masks cannot be read ({shown(str(error), 100)})") from None
    return None if window >= length else window


class _Given(torch.nn.Module):
    """In place of the layers, or of any part of them: hands on final hidden states, so that the model makes logits of them as it does."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self.hidden)


class HookedDecoder:
    """A model of transformers and its forward over one flattened batch, like ``Decoder``.

    Attributes:
        config: its sizes, as its attention showed them.
        parameters: weights in all.

    Raises:
        ModelError: see ``load_hooked``.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> None:
        name = checkpoint.name
        self.ops = ops
        self._model, self._base = _loaded(checkpoint, dtype, ops.device)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        config = self._model.config
        length = next((value for key in _LENGTHS if type(value := getattr(config, key, None)) is int), 2048)
        self._hook = _Hook(ops, name, length)
        for module in self._model.modules():
            setattr(module, _HOOK, self._hook)
        tokens = torch.arange(min(8, config.vocab_size), device=ops.device)[None]
        out = self._call(tokens, torch.arange(tokens.shape[1], device=ops.device)[None], None)
        self._given = _Given(type(out))
        self.config = self._config(checkpoint, out.last_hidden_state.shape[-1])
        self._check(name, tokens[0].cpu().numpy().astype(np.int32), dtype)

    def forward(
        self,
        tokens: IntArray | torch.Tensor,
        positions: IntArray,
        write_slots: IntArray,
        q_lens: IntArray,
        kv_lens: IntArray,
        kv_slots: IntArray,
        store: KVStore,
    ) -> None:
        """See ``Decoder.forward``."""
        ops, config = self.ops, self.config
        slots = torch.from_numpy(write_slots).long().to(ops.device)
        plans = {
            window: ops.plan_attention(q_lens, kv_lens, kv_slots, config.num_heads, config.num_kv_heads, window)
            for window in set(config.windows)
        }
        self._hook.batch = _Batch(slots, plans, store)
        ids, at = (torch.as_tensor(array).long().to(ops.device)[None] for array in (tokens, positions))
        # a mask of four dimensions is left as it is, and so none is made
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ops.device)
        ops.store(store.hidden, slots, self._call(ids, at, mask).last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 ``[R, vocab]``, of final hidden states ``[R, hidden]``."""
        prefix = self._model.base_model_prefix
        self._given.hidden = hidden[None]
        setattr(self._model, prefix, self._given)
        try:
            logits: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            setattr(self._model, prefix, self._base)
        return logits.float()

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> Any:
        return self._base(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)

    def _config(self, checkpoint: Checkpoint, hidden: int) -> ModelConfig:
        hook, config = self._hook, self._model.config
        count = getattr(config, "num_hidden_layers", len(hook.calls))
        if not hook.calls or len(hook.calls) != count:
            raise ModelError(f"{hook.name}: {len(hook.calls)} of its {count} layers use the attention interface")
        first = hook.calls[0]
        sizes = {(call.heads, call.kv_heads, call.key_dim) for call in hook.calls}
        if len(sizes) > 1:
            raise ModelError(f"{hook.name}: its layers have heads of different numbers or sizes")
        return ModelConfig(
            family=Family(str(checkpoint.config.get("model_type"))),
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            intermediate_size=0,
            num_layers=count,
            num_heads=first.heads,
            num_kv_heads=first.kv_heads,
            head_dim=first.key_dim,
            norm_eps=0.0,
            max_position=hook.length,
            rotary_dim=0,
            ropes=(),
            rope_of=(None,) * count,
            tie_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            windows=tuple(call.window for call in hook.calls),
            torch_dtype=None,
            activation="",
            attention_scale=first.scale,
        )

    def _check(self, name: str, tokens: IntArray, dtype: torch.dtype) -> None:
        """Tokens whole, in pieces and in a batch, beside transformers' own attention.

        first     |--- a batch of both ---|
        second    |--- first of the batch |-- then more --|- and the last -|
        """
        second = tokens[::-1].copy()
        store = KVStore(self.config, len(tokens) * 2, dtype, dtype, self.ops.device)
        cut, end = len(tokens) // 2, len(tokens)
        mine, other = np.arange(end), np.arange(end, 2 * end)
        steps = (
            [(tokens, mine, 0, end), (second, other, 0, cut)],
            [(second, other, cut, end - 1)],
            [(second, other, end - 1, end)],
        )
        for pieces in steps:
            arrays = (
                np.concatenate([ids[low:high] for ids, _, low, high in pieces]),
                np.concatenate([np.arange(low, high) for _, _, low, high in pieces]),
                np.concatenate([slots[low:high] for _, slots, low, high in pieces]),
                np.array([high - low for _, _, low, high in pieces]),
                np.array([high for _, _, _, high in pieces]),
                np.concatenate([slots[:high] for _, slots, _, high in pieces]),
            )
            tokens_, positions, slots, q_lens, kv_lens, kv_slots = (array.astype(np.int32) for array in arrays)
            self.forward(tokens_, positions, slots, q_lens, kv_lens, kv_slots, store)
        ours = self.logits(store.hidden)
        if ours.shape[1] != self.config.vocab_size:
            raise ModelError(f"{name}: gives {ours.shape[1]} logits, vocab_size={self.config.vocab_size}")
        self._model.set_attn_implementation("eager")
        ids = torch.from_numpy(np.stack((tokens, second))).long().to(self.ops.device)
        expected = self._model(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
        self._model.set_attn_implementation(_NAME)
        difference = float((ours - expected).abs().mean() / expected.std())
        if not difference <= _REL.get(dtype, _HALF):
            raise ModelError(
                f"{name}: computed in pieces it differs from transformers' own result by {difference:.2g} of its deviation: "
                "its layers keep more than keys and values, or attend in a way of their own"
            )


def load_hooked(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> HookedDecoder:
    """Load a model of transformers that is no family of ours.

    Raises:
        ModelError: it is unknown, not a causal language model, keeps more than keys and values between tokens, has code of its own,
            or its layers attend in a way that paged attention does not; names which.
    """
    try:
        with torch.inference_mode():
            return HookedDecoder(checkpoint, ops, dtype)
    except ModelError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ModelError(f"{checkpoint.name}: does not fit into memory ({shown(str(error))})") from None
    except Exception as error:  # whatever a model's own code may raise
        raise ModelError(f"{checkpoint.name}: cannot be run through transformers ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__, 200)


def is_hooked(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is to be tried through transformers: no row of ``registry`` is for it."""
    kind = checkpoint.config.get("model_type")
    if checkpoint.format != "safetensors" or not isinstance(kind, str) or kind in PARTS:
        return False
    try:
        family(kind)
    except ModelError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return kind in CONFIG_MAPPING_NAMES or "auto_map" in checkpoint.config
    return False


def sizes_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Layers, heads, key heads, size of a head, hidden size, vocabulary and most positions, as the config tells them: what is computed
    with is found out when the model is loaded.

    Raises:
        ModelError: the config has none of these, or transformers does not know it.
    """
    from transformers import AutoConfig

    _check_files(checkpoint)
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        length = next((int(n) for name in _LENGTHS if (n := getattr(config, name, None))), 2048)
        sizes = (int(config.num_hidden_layers), heads, kv_heads, dim, hidden, int(config.vocab_size), length)
    except Exception as error:
        raise ModelError(f"{checkpoint.name}: its config tells no sizes ({_reason(error)})") from None
    if min(sizes) < 1:
        raise ModelError(f"{checkpoint.name}: its config tells sizes below 1")
    return sizes


def _check_files(checkpoint: Checkpoint) -> None:
    """What is to be known before transformers reads a config, which runs what it names and builds as many layers as it says.

    Raises:
        ModelError: it has code of its own, an adapter, or more layers than tensors.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = checkpoint.config
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING_NAMES:
        raise ModelError(
            f"model_type={shown(kind)} is not supported: it needs code of its own (auto_map), which is not run"
        )
    if (checkpoint.path / "adapter_config.json").exists():
        raise ModelError(f"{checkpoint.name}: adapter_config.json: adapters of a {kind} model are not supported")
    most = len(checkpoint.names())
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for name in _COUNTS:
            value = part.get(name)
            if isinstance(value, (int, float)) and not value <= most:
                raise ModelError(f"{checkpoint.name}: {name}={shown(value)}: there are only {most} tensors")


def _refusal(config: Any, raw: Mapping[str, Any]) -> str:
    """Why a config's model cannot be run, as far as the config says."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        return "it is an encoder and a decoder"
    if config.get_text_config() is not config or any(name in raw for name in ("vision_config", "audio_config")):
        return "it has parts beside a text model"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "it is not a causal language model"
    if raw.get("quantization_config") is not None:
        return "quantized weights are read for the families of radixrt only"
    others = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYERS]
    if others:
        return (
            f"it has layers of {shown(others[0])}, which keep more than keys and values or attend in a way of their own"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, Mapping)}
    if moving := kinds & {"dynamic", "longrope"}:
        return f"its rope_type={min(moving)} changes with the length of a sequence, and so would keys in the cache"
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model, "_is_stateful", False):
        return "its layers keep state beside keys and values"
    if not model._can_set_attn_implementation():
        return "its layers do not use the attention interface"
    return ""


def _check_size(config: Any, checkpoint: Checkpoint) -> None:
    """An error for a config of a far larger model than the files hold, before there is memory for it."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        said = sum(tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters())
    held = sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names())
    if said > 2 * held:  # a tied matrix may be in the files once
        raise ModelError(
            f"{checkpoint.name}: its config is of a model of {said:,} numbers, its tensors have {held:,}: "
            "vocab_size, hidden_size or another size of it is wrong"
        )


def _loaded(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """The model, with our attention in it, and its layers without the head."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils import logging

    _check_files(checkpoint)
    kind = shown(checkpoint.config.get("model_type"))
    config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
    reason = _refusal(config, checkpoint.config)
    if reason:
        raise ModelError(f"model_type={kind} is not supported: {reason}")
    _check_size(config, checkpoint)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    shows, tells = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong with its tensors is told below
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    finally:
        logging.set_verbosity(tells)
        if shows:
            logging.enable_progress_bar()
    for key, own, said in sorted(found.get("mismatched_keys") or ()):
        raise ModelError(f"{checkpoint.name}: tensor {key!r} has shape {list(own)}, the config says {list(said)}")
    for key, problem in (("missing_keys", "is missing"), ("unexpected_keys", "would be ignored")):
        if found.get(key):
            raise ModelError(f"{checkpoint.name}: tensor {shown(min(map(str, found[key])))} {problem}")
    model = model.to(device).eval().requires_grad_(False)
    base = getattr(model, model.base_model_prefix)
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise ModelError(f"model_type={kind} is not supported: positions of its tokens cannot be given")
    return model, base
