"""Owns what a checkpoint's ``quantization_config`` means: which tensors make up a quantized matrix, and how its codes are read.

Invariants: an option that changes the meaning of the codes is honoured or refused by name; every tensor of a quantized matrix is
there, with the shape and type the config says, before any is read; a matrix read packed and one read dense are equal.

Layouts, for a matrix ``[N, K]`` in groups of ``group`` columns, packed into int32 from the lowest bits up:
  awq      ``qweight [K, N / 8]``, ``qzeros [K / group, N / 8]``: eight outputs a word, in the order 0 2 4 6 1 3 5 7
  gptq     ``qweight [K * bits / 32, N]``: consecutive columns a word; ``qzeros [K / group, N * bits / 32]``, less one before
           gptq_v2; ``g_idx [K]``: the group of each column
  packed   (compressed-tensors) ``weight_packed [N, K * bits / 32]``, signed codes plus ``2 ** (bits - 1)``;
           ``weight_zero_point [N * bits / 32, K / group]`` alike
  fp8      ``weight [N, K]`` in float8_e4m3fn, times ``weight_scale`` or ``weight_scale_inv`` (which multiplies, too)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import regex
import torch

from radixrt.errors import ModelError, nearest, shown
from radixrt.model.safetensors_file import SafetensorsEntry
from radixrt.ops.weights import BLOCK, Fp8Weight, IntWeight, PackedWeight, dequantized, pack_nibbles

_FLOATS = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output the bits 4 i of a word hold

# Options that are read, and those that only say how the codes were found or how to run them; any other could change what they mean.
_READ = {
    "awq": "bits w_bit group_size q_group_size zero_point version format modules_to_not_convert",
    "gptq": "bits group_size desc_act checkpoint_format format pack_dtype dynamic",
    "fp8": "activation_scheme weight_block_size modules_to_not_convert ignored_layers scale_fmt kv_cache_scheme fmt",
    "compressed-tensors": "config_groups format ignore kv_cache_scheme sparsity_config transform_config",
    "mxfp4": "modules_to_not_convert",
}
_HARMLESS = {
    "awq": "backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse desc_act sym checkpoint_format",
    "gptq": "sym true_sequential damp_percent damp_auto_increment static_groups model_name_or_path lm_head "
    "model_file_base_name meta dataset batch_size cache_block_outputs block_name_to_quantize exllama_config tokenizer "
    "disable_exllama use_exllama use_cuda_fp16 max_input_length model_seqlen module_name_preceding_first_block mse backend "
    "modules_in_block_to_quantize pad_token_id act_group_aware version offload_to_disk autoround_version iters nsamples",
    "fp8": "dequantize expert_dtype modules_to_convert",
    "compressed-tensors": "quantization_status global_compression_ratio version",
    "mxfp4": "dequantize",
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of a checkpoint are quantized.

    Fields:
        layout: awq, gptq, gptq_v2, packed or fp8; see the module.
        bits: of a code.
        group: columns that share a scale; ``None``: all of a row.
        block: rows and columns that share a scale (fp8), where the config says so.
        static: activations have a scale of their own in the file (fp8).
        kept: names, or patterns after ``re:``, of the modules that are not quantized.
        needs: tensors of each matrix that the config says there are, and that others do without.
    """

    layout: str
    bits: int = 8
    group: int | None = None
    block: tuple[int, int] | None = None
    static: bool = False
    kept: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Matrix:
    """One quantized matrix: its name as a dense one, shape, and the tensors it is made of by role."""

    name: str
    shape: tuple[int, int]
    parts: Mapping[str, str]


def scheme_of(config: Mapping[str, Any], source: str) -> Scheme | None:
    """What ``config.json`` says of quantization; ``None``: nothing, or mxfp4, whose blocks belong to a family's own reading.

    Raises:
        ModelError: a method, option or value that is not supported; names it, and the nearest that is.
    """
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None:
        return None
    options = _Options(found, f"{source}: quantization_config")
    method = options.choice("quant_method", tuple(_READ))
    known = {"quant_method", *_READ[method].split(), *_HARMLESS[method].split()}
    for name, value in options.values.items():
        # a key that starts with _ is a note, and one that is null or false asks for nothing
        if name not in known and not name.startswith("_") and value not in (None, False):
            hint = nearest(name, known)
            hint = hint if "did you mean" in hint else ""
            raise options.wrong(name, f"is no option of {method} that is supported{hint}")
    if method == "mxfp4":
        return None
    return {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}[method](options)


class _Options:
    """The options of a quantization config, or of an object within it."""

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} must be an object")
        self.values, self._where = values, where

    def wrong(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._where}.{name}={shown(self.values.get(name))} {problem}")

    def choice(self, name: str, valid: tuple[Any, ...], default: Any = None) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) is not isinstance(valid[0], bool) or value not in valid:
            hint = nearest(value, [str(v) for v in valid]) if isinstance(value, str) else ""
            hint = hint if "did you mean" in hint else ""
            raise self.wrong(name, f"is not supported; supported: {', '.join(map(str, valid))}{hint}")
        return value

    def group(self, name: str) -> int | None:
        value = self.values.get(name, 128)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or 0 < value < 2**24):
            raise self.wrong(name, "must be a positive integer, or -1 for one group a row")
        return None if value == -1 else value

    def names(self, *fields: str) -> tuple[str, ...]:
        for name in fields:
            value = self.values.get(name)
            if value is not None:
                if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                    raise self.wrong(name, "must be a list of module names")
                return tuple(value)
        return ()

    def absent(self, *fields: str) -> None:
        for name in fields:
            if self.values.get(name):
                raise self.wrong(name, "is not supported")


def _awq(options: _Options) -> Scheme:
    short = "bits" in options.values or "w_bit" not in options.values
    options.choice("bits" if short else "w_bit", (4,), 4)
    options.choice("version" if options.values.get("version") is not None else "format", ("gemm", "GEMM"), "gemm")
    options.choice("zero_point", (True,), True)
    group = options.group("group_size" if "group_size" in options.values else "q_group_size")
    return Scheme("awq", 4, group, kept=options.names("modules_to_not_convert"))


def _gptq(options: _Options) -> Scheme:
    bits = options.choice("bits", (4, 8, 2))
    name = "checkpoint_format" if options.values.get("checkpoint_format") is not None else "format"
    layout = options.choice(name, ("gptq", "gptq_v2"), "gptq")
    options.choice("pack_dtype", ("int32", "torch.int32"), "int32")
    options.absent("dynamic")
    ordered, group = options.choice("desc_act", (True, False), False), options.group("group_size")
    return Scheme(layout, bits, group, needs=("g_idx",) if ordered and group is not None else ())


def _fp8(options: _Options) -> Scheme:
    static = options.choice("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    options.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    options.choice("scale_fmt", ("float",), "float")
    kept = options.names("modules_to_not_convert", "ignored_layers")
    return Scheme("fp8", 8, None, _block(options, "weight_block_size"), static, kept)


def _block(options: _Options, name: str) -> tuple[int, int] | None:
    value = options.values.get(name)
    if value is None:
        return None
    whole = isinstance(value, (list, tuple)) and len(value) == 2
    if not whole or not all(isinstance(v, int) and not isinstance(v, bool) and 0 < v < 2**24 for v in value):
        raise options.wrong(name, "must be two positive integers, rows and columns")
    return int(value[0]), int(value[1])


def _compressed(options: _Options) -> Scheme:
    layout = options.choice("format", ("float-quantized", "pack-quantized"))
    for name in ("sparsity_config", "transform_config"):
        if options.values.get(name):
            raise options.wrong(name, "is not supported")
    groups = options.values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise options.wrong("config_groups", "must be an object with one scheme or more")
    schemes = [_compressed_group(options, name, groups[name], layout) for name in groups]
    if any(scheme != schemes[0] for scheme in schemes):
        raise options.wrong("config_groups", "must quantize the weights of all groups in one way")
    return schemes[0]


def _compressed_group(options: _Options, name: str, value: object, layout: str) -> Scheme:
    where = f"quantization_config.config_groups.{name}"
    group = _Options(value, where)
    weights = _Options(group.values.get("weights"), where + ".weights")
    inputs = group.values.get("input_activations")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    kept = options.names("ignore")
    if layout == "pack-quantized":
        weights.choice("type", ("int",), "int")
        bits = weights.choice("num_bits", (4, 8), 8)
        by_group = weights.choice("strategy", ("group", "channel"), "group") == "group"
        needs: tuple[str, ...] = () if weights.choice("symmetric", (True, False), True) else ("weight_zero_point",)
        if by_group and weights.values.get("actorder") in (True, "group", "dynamic"):
            needs += ("weight_g_idx",)
        return Scheme("packed", bits, weights.group("group_size") if by_group else None, kept=kept, needs=needs)
    weights.choice("type", ("float",))
    weights.choice("num_bits", (8,), 8)
    blocks = weights.choice("strategy", ("tensor", "channel", "block"), "tensor") == "block"
    return Scheme("fp8", 8, None, _block(weights, "block_structure") if blocks else None, static, kept)


def find_matrices(
    scheme: Scheme, entries: Mapping[str, SafetensorsEntry], source: str
) -> tuple[dict[str, Matrix], set[str]]:
    """The quantized matrices among the tensors ``entries`` by their names as dense ones, and the names of all tensors used up.

    Raises:
        ModelError: a matrix lacks a tensor, has one of another shape or type than the scheme says, or should not be quantized.
    """
    main = {"awq": "qweight", "packed": "weight_packed", "fp8": "weight"}.get(scheme.layout, "qweight")
    matrices: dict[str, Matrix] = {}
    used: set[str] = set()
    for name, entry in entries.items():
        base, _, last = name.rpartition(".")
        if last != main or (main == "weight" and entry.dtype != "F8_E4M3"):
            continue
        for kept in scheme.kept:
            if _names(kept, base):
                raise ModelError(f"{source}: {name!r} is quantized, and quantization_config excludes {shown(kept)}")
        matrix = _matrix(scheme, base, main, entries, source)
        matrices[matrix.name] = matrix
        used.update(matrix.parts.values())
        used.update(f"{base}.{extra}" for extra in ("weight_shape", "g_idx", "weight_g_idx", "input_zero_point"))
    # scales for a cache in fp8: ours has none, see --kv-dtype
    used.update(name for name in entries if name.endswith((".k_scale", ".v_scale")))
    both = sorted(set(matrices) & set(entries) - used)
    if both:
        raise ModelError(f"{source}: {both[0]!r} is there both quantized and not")
    return matrices, used


def _names(kept: str, module: str) -> bool:
    """Whether an entry of a list of excluded modules means ``module``: whole parts of its path, or a pattern."""
    if not kept.startswith("re:"):
        return f".{kept.removesuffix('.weight')}." in f".{module}."
    try:
        return bool(regex.match(kept[3:], module, timeout=1.0))
    except (regex.error, TimeoutError):
        raise ModelError(
            f"quantization_config.ignore has {shown(kept)}, which is no pattern that can be used"
        ) from None


def _matrix(scheme: Scheme, base: str, main: str, entries: Mapping[str, SafetensorsEntry], source: str) -> Matrix:
    name, bits = f"{base}.weight", scheme.bits
    parts: dict[str, str] = {}

    def part(role: str, *dtypes: str, optional: bool = False) -> tuple[int, ...] | None:
        """The shape of the tensor of this role, of one of these types."""
        full = f"{base}.{role}"
        if full not in entries:
            if optional and role not in scheme.needs:
                return None
            raise ModelError(f"{source}: tensor {full!r} is missing, {base + '.' + main!r} needs it")
        if entries[full].dtype not in dtypes:
            raise ModelError(f"{source}: tensor {full!r} has dtype {entries[full].dtype}, not {' or '.join(dtypes)}")
        parts[role] = full
        return entries[full].shape

    def expect(role: str, found: tuple[int, ...] | None, *shapes: tuple[int, ...]) -> None:
        if found is not None and found not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(f"{source}: tensor {base + '.' + role!r} has shape {list(found)}, not {wanted}")

    codes = part(main, "F8_E4M3" if scheme.layout == "fp8" else "I32")
    if codes is None or len(codes) != 2 or 0 in codes:
        raise ModelError(f"{source}: tensor {base + '.' + main!r} has shape {list(codes or ())}, not two dimensions")
    if scheme.layout == "fp8":
        rows, columns = codes
        role = "weight_scale_inv" if f"{base}.weight_scale_inv" in entries else "weight_scale"
        scales = part(role, *_FLOATS)
        if scheme.block is None:
            expect(role, scales, (), (1,), (1, 1), (rows,), (rows, 1))
        else:
            expect(role, scales, (-(-rows // scheme.block[0]), -(-columns // scheme.block[1])))
        for static in ("input_scale", "activation_scale"):
            expect(static, part(static, *_FLOATS, optional=True), (), (1,), (1, 1))
        if scheme.static and not {"input_scale", "activation_scale"} & set(parts):
            part("input_scale", *_FLOATS)
        return Matrix(name, (rows, columns), parts)
    word = 32 // bits
    if scheme.layout == "packed":
        rows, columns = codes[0], codes[1] * word
        groups = -(-columns // (scheme.group or columns))
        expect("weight_scale", part("weight_scale", *_FLOATS), (rows, groups))
        zeros = part("weight_zero_point", "I32", optional=True)
        expect("weight_zero_point", zeros, (-(-rows // word), groups))
        expect("weight_g_idx", part("weight_g_idx", "I32", optional=True), (columns,))
        expect("weight_shape", part("weight_shape", "I64", "I32"), (2,))
        return Matrix(name, (rows, columns), parts)
    rows, columns = (codes[1] * 8, codes[0]) if scheme.layout == "awq" else (codes[1], codes[0] * word)
    groups = -(-columns // (scheme.group or columns))
    expect("qzeros", part("qzeros", "I32"), (groups, -(-rows // word)))
    expect("scales", part("scales", *_FLOATS), (groups, rows))
    if scheme.layout != "awq":
        expect("g_idx", part("g_idx", "I32", optional=True), (columns,))
    return Matrix(name, (rows, columns), parts)


def read_matrix_codes(scheme: Scheme, matrix: Matrix, tensor: Callable[[str], torch.Tensor]) -> Codes | Fp8Weight:
    """The codes of a matrix, unpacked; ``tensor`` reads one by its name.

    Raises:
        ModelError: scales that are no numbers, or a group that does not exist.
    """
    parts = {role: tensor(name) for role, name in matrix.parts.items()}
    rows, columns = matrix.shape
    if scheme.layout == "fp8":
        scales = next(parts[role] for role in ("weight_scale_inv", "weight_scale") if role in parts).float()
        block_rows, block_columns = scheme.block or (rows if scales.numel() == 1 else 1, columns)
        static = [parts[role] for role in ("input_scale", "activation_scale") if role in parts]
        used = static[0].float().reshape(()) if static and scheme.static else None
        for values in (scales, *static):
            _finite(matrix, values)
        if used is not None and used <= 0:
            raise ModelError(f"the input scale of {matrix.name!r} is {float(used):g}, it must be positive")
        scales = scales if scheme.block else scales.reshape(-1, 1)
        return Fp8Weight(parts["weight"], scales, block_rows, min(block_columns, columns), used)
    bits, word = scheme.bits, 32 // scheme.bits
    middle = torch.full((), 1 << (bits - 1), dtype=torch.uint8)
    index = parts.get("g_idx", parts.get("weight_g_idx"))
    if scheme.layout == "packed":
        codes, scales = _unpacked(parts["weight_packed"], bits), parts["weight_scale"]
        if tuple(parts["weight_shape"].tolist()) != matrix.shape:
            raise ModelError(
                f"the columns of {matrix.name!r} do not fill whole words of {word}, which is not supported"
            )
        stored = parts.get("weight_zero_point")
        zeros = middle.expand(scales.shape) if stored is None else _unpacked(stored.t(), bits)[:, :rows].t()
    elif scheme.layout == "awq":
        order = torch.tensor(_AWQ_ORDER).argsort()
        codes = _unpacked(parts["qweight"], 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
        zeros = _unpacked(parts["qzeros"], 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).t()
        scales = parts["scales"].t()
    else:
        codes, scales, stored = _unpacked(parts["qweight"].t(), bits), parts["scales"].t(), parts["qzeros"]
        if scheme.layout == "gptq":
            # one was taken from every code of a word, with borrows from code to code: adding it to the word undoes that
            stored = (stored.long() + sum(1 << i for i in range(0, 32, bits))).to(torch.int32)
        zeros = _unpacked(stored, bits)[:, :rows].t()
    _finite(matrix, scales)
    group = min(scheme.group or columns, columns)
    plain = torch.arange(columns) // group
    if index is not None:
        index = index.long()
        if scales.shape[1] > 1 and not bool(index.any()):
            index = plain  # left empty where the columns are in order
        if not 0 <= int(index.min()) <= int(index.max()) < scales.shape[1]:
            raise ModelError(
                f"tensor {matrix.name.removesuffix('weight') + 'g_idx'!r} names a group that does not exist"
            )
    return Codes(codes, scales, zeros, bits, group, plain if index is None else index)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """``weight[n, k] = scales[n, index[k]] * (codes[n, k] - zeros[n, index[k]])``, one code a byte."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group: int
    index: torch.Tensor

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix, computed in float32 and rounded once."""
        steps = self.codes.float() - self.zeros.float()[:, self.index]
        return steps.mul_(self.scales.float()[:, self.index]).to(dtype).contiguous()

    def packed(self) -> IntWeight | None:
        """The kernels' layout; ``None`` where groups are ragged or no multiple of its blocks."""
        columns = self.codes.shape[1]
        if self.group % BLOCK or columns % self.group:
            return None
        order = None
        if not torch.equal(self.index, torch.arange(columns) // self.group):
            if not bool((self.index.bincount(minlength=columns // self.group) == self.group).all()):
                return None
            order = self.index.argsort(stable=True)
        codes = self.codes if order is None else self.codes[:, order]
        bits = max(self.bits, 4)
        plain = bool((self.zeros == 1 << (bits - 1)).all())
        return IntWeight(
            pack_nibbles(codes.contiguous()) if bits == 4 else codes.contiguous(),
            self.scales.contiguous(),
            None if plain else self.zeros.contiguous(),
            bits,
            self.group,
            order,
        )


def dense_of(codes: Codes | Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    return codes.dense(dtype) if isinstance(codes, Codes) else dequantized(codes, dtype)


def packed_of(codes: Codes | Fp8Weight) -> PackedWeight | None:
    return codes.packed() if isinstance(codes, Codes) else codes


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 ``[..., W]`` -> uint8 ``[..., W * 32 / bits]``, from the lowest bits up."""
    octets = words.contiguous().view(torch.uint8)  # of a little-endian machine, as everything here
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _finite(matrix: Matrix, values: torch.Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise ModelError(f"the scales of {matrix.name!r} are not all finite")
