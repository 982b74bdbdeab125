"""nibble: 4-bit and 8-bit quantized linear layers at the speed of the hardware, on CPUs and NVIDIA GPUs.

    import nibble

    checkpoint = nibble.open("Llama-3-8B-AWQ")                  # AWQ, GPTQ, compressed-tensors, FP8, ...
    q = checkpoint.read("model.layers.0.mlp.down_proj")         # a QuantTensor: codes, scales, zeros as NumPy arrays
    w = nibble.pack(q)                                          # once
    y = w.linear(x)                                             # y[..., N] = x[..., K] · Wᵀ, as often as you like

Arrays of NumPy, PyTorch, JAX and CuPy are read where they are; results are of the kind of x. bf16 and FP8 in NumPy are ml_dtypes arrays,
or their bits: uint16 is read as bf16, uint8 as FP8 (e4m3), but as codes where activations have zero points. Errors are the classes of
nibble.errors. Everything may be called from several threads at once; the interpreter's lock is released while nibble computes.
"""

from __future__ import annotations

import builtins
import copyreg
import json
import os
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from . import _arrays, _core
from ._core import (
    Bucket,
    Candidate,
    Checkpoint,
    FormatInfo,
    KernelInfo,
    LayoutInfo,
    Module,
    Note,
    PackedModule,
    PlanCache,
    QuantError,
    QuantTensor,
    TransformedModule,
    TransformReport,
    VerifyReport,
    formats,
    kernels,
    layouts,
)
from ._core import version as __version__
from .errors import AlreadyExists, CorruptData, Error, Internal, InvalidArgument, IoError, NotFound, Unsupported

__all__ = [
    "AlreadyExists", "Array", "Bucket", "Candidate", "Checkpoint", "Conv", "CorruptData", "Error", "ExpertLayer", "FormatInfo", "Internal", "InvalidArgument",
    "IoError", "KernelInfo", "LayoutInfo", "Linear", "Module", "Norm", "NotFound", "Note", "PackedExperts", "PackedFile", "PackedModule", "PackedWeight", "PlanCache",
    "QuantError", "QuantTensor", "TransformReport", "TransformedModule", "Unsupported", "VerifyReport", "__version__", "convert_checkpoint",
    "dequantize_checkpoint", "doctor", "errors", "expert_layers", "explain", "formats", "grouped", "join", "kernels", "layouts", "moe", "open", "pack", "pack_expert_layer", "pack_experts", "packed_weight",
    "quantization_error", "quantize", "quantize_activations", "quantize_checkpoint", "quantize_conv", "read_tensors", "route", "save_packed", "verify",
    "verify_conv",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__ + [name for name in ("compat", "peft", "torch", "transformers", "vllm") if name in globals()]  # those that have been imported


Array = Any
"""An array of NumPy, PyTorch, JAX, CuPy, or anything with `__dlpack__`."""


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint: a directory with *.safetensors (and config.json), or one .safetensors file.

    Raises NotFound, IoError, CorruptData (with the file, tensor and byte offset).
    """
    return Checkpoint(os.fspath(path))


def read_tensors(tensors: Mapping[str, Array | tuple[Array, str]], config: Mapping[str, Any] | str | None = None) -> QuantTensor:
    """Decodes a layer that is in memory already. `tensors` maps names inside the layer to arrays of host memory: {"qweight": …,
    "qzeros": …, "scales": …}, or to (bits, type) where an array cannot say its type: (uint8 array, "e4m3"). `config` is the model's quantization_config, which says what shapes cannot.

    Raises NotFound when no format has such tensors, CorruptData, Unsupported.
    """
    text = config if isinstance(config, str) else json.dumps(config) if config is not None else ""
    return _core.read_module({name: t if isinstance(t, tuple) else _arrays.export(t) for name, t in tensors.items()}, text)


def quantize(w: Array, scheme: str = "u4b8g128", *, scale: Any = "f16", clip_search: bool = False) -> QuantTensor:
    """Rounds w [N,K] (f32, f16 or bf16, host memory) to nearest.

    scheme: "u4b8g128" symmetric, "u4zg128" with zero points, 2 to 8 bits; "s8c", "e4m3b128x128", ...
    scale: the type of the scales, f16, bf16 or f32. clip_search: shrink a group's range while that lowers its error.
    Raises InvalidArgument when the groups do not divide K, or for a NaN or an infinity (with its position).
    """
    return _core.quantize(_arrays.export(w), scheme=scheme, scale=_arrays.token(scale), clip_search=clip_search)


def quantize_conv(w: Array, scheme: str = "u4b8g128", *, scale: Any = "f16", clip_search: bool = False) -> QuantTensor:
    """The same for the filter of a convolution, w [Co, C/groups, Kh, Kw]: K is Kh·Kw·C/groups, in that order.

    Groups whose size divides C/groups lie inside one element of the filter; others span several elements. Those of "u4oci32" are 32
    channels at all elements of the filter, as MNN has them.
    """
    return _core.quantize_conv(_arrays.export(w), scheme=scheme, scale=_arrays.token(scale), clip_search=clip_search)


Progress = Callable[[int, int, str], Any]
"""Called with (done, total, what) while a checkpoint is written; what it raises ends that."""


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    scheme: str = "u4b8g128",
    *,
    format: str | None = None,
    scale: Any = None,
    clip_search: bool = False,
    calibration: str | os.PathLike[str] | None = None,
    smooth: float | None = None,
    conv: bool = False,
    only: str | None = None,
    skip: str | None = None,
    all: bool = False,
    dry_run: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TransformReport:
    """Quantizes the float checkpoint `source` into `target`, as `nibble quantize` does: a directory if source is one, else a file.

    scheme: of weights, "u4zg128", or of activations too, "s8r_s8c", "e4m3r_e4m3b128x128"; "s8t_s8c" finds the scales of activations in
    the calibration. format: one that nibble.formats() can_write; by default compressed-tensors, of 8-bit activations int-quantized or
    float-quantized, of "e2m1g32" mxfp4, for the experts of gpt-oss. scale: the type of scales, by default that of 16-bit weights, as `nibble quantize` has it. calibration: a safetensors file with
    NAME.input_absmax [K] or NAME.input [tokens,K]. smooth: SmoothQuant's α from 0 to 1; needs the calibration. conv: convolutions too.
    only, skip: regular expressions searched in names: the only layers to quantize, and those to leave alone. all: embeddings, output
    heads and routers of experts too, which stay float otherwise. dry_run: the report says what would be done; nothing is written.

    The target appears whole or not at all. Raises AlreadyExists unless `overwrite`, Unsupported with the layer, IoError, and what open() does.
    """
    act = _core.act_scheme(scheme) if "_" in scheme else ""
    if format is None:
        format = "float-quantized" if act.startswith("e4m3") else "int-quantized" if act else "compressed-tensors"
        format = "mxfp4" if scheme.startswith("e2m1") else format
    return _core.quantize_checkpoint(
        os.fspath(source), os.fspath(target), scheme=scheme, format=format, scale="" if scale is None else _arrays.token(scale),
        clip_search=clip_search, calibration=os.fspath(calibration or ""), smooth=smooth, conv=conv, only=only or "", skip=skip or "",
        all=all, dry_run=dry_run, overwrite=overwrite, progress=progress,
    )  # fmt: skip


def convert_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], format: str, *, overwrite: bool = False,
    progress: Progress | None = None,
) -> TransformReport:  # fmt: skip
    """Rewrites the quantized checkpoint `source` in another format, without loss or not at all. Otherwise as quantize_checkpoint()."""
    return _core.convert_checkpoint(os.fspath(source), os.fspath(target), format=format, overwrite=overwrite, progress=progress)


def dequantize_checkpoint(
    source: str | os.PathLike[str], target: str | os.PathLike[str], dtype: Any = "f16", *, overwrite: bool = False,
    progress: Progress | None = None,
) -> TransformReport:  # fmt: skip
    """Turns the quantized checkpoint `source` into one of f32, f16 or bf16 weights, bit-exact. Otherwise as quantize_checkpoint()."""
    return _core.dequantize_checkpoint(
        os.fspath(source), os.fspath(target), dtype=_arrays.token(dtype), overwrite=overwrite, progress=progress
    )


def quantization_error(w: Array, q: QuantTensor) -> QuantError:
    """How far q is from w [N,K]."""
    return _core.quantization_error(_arrays.export(w), q)


def pack(
    q: QuantTensor, *, backend: str = "cpu", a_dtype: Any = "f32", act_scheme: str = "", layout: str = "", kernel: str = "", m_max: int = 1 << 13,
    accumulation: str = "fast", glu: bool = False, glu_limit: float | None = None, glu_offset: float = 0.0,
) -> PackedWeight:  # fmt: skip
    """Rearranges q for the kernels of a backend, "cpu" or "cuda" (the current GPU, into its memory).

    a_dtype: the type of the activations to come. The weight remembers it with act_scheme, accumulation and m_max. act_scheme: how linear() quantizes them while running: "s8r" to int8 per token, "s8g128" per 128 channels, "e4m3r" to FP8; "" not at
    all. A whole scheme, "s8r_u4zg128", may be given too. layout, kernel: by name, in place of a choice by cost for M up to m_max.
    accumulation: how products of FP8 codes are added up where there is a choice, on GPUs of compute capability 9.0: "fast", or "precise",
    whose error does not grow with K.
    glu: linear() joins the two halves of its result, activation(first) · second, of N/2 columns: for gate and up as one layer (join()).
    glu_limit: the magnitude at which both halves saturate before that (gpt-oss: 7); glu_offset: added to the second half (gpt-oss: 1).
    Raises Unsupported when no layout can hold q, or without a GPU.
    """
    return PackedWeight(
        _core.pack(
            q, backend=backend, a_dtype=_arrays.token(a_dtype), act_scheme=act_scheme, layout=layout, kernel=kernel, m_max=m_max,
            accumulation=accumulation, glu=glu, glu_limit=glu_limit, glu_offset=glu_offset,
        )
    )  # fmt: skip


def join(parts: Sequence[QuantTensor]) -> QuantTensor:
    """Layers that read the same activations, as one: q, k and v of attention; gate and up (in this order) of a glu.

    The result of the joined layer is that of the parts side by side. Scales per tensor become scales per output channel, which say the same;
    parts without a bias have zeros in the joined one, if another part has a bias.
    Raises InvalidArgument where they differ in k, scheme, types, or in what they do to activations: g_idx, prescale, static_acts, act_limit.
    """
    return _core.join(list(parts))


@dataclass(frozen=True)
class Norm:
    """What PackedWeight.linear() does to x first: y = x / sqrt(mean(x²) + eps) · (weight + weight_offset), or a LayerNorm.

    Means are over the channels of a token, arithmetic is float32, and y is rounded once to the type of x.
    """

    weight: Array
    """[K], of a float type."""
    kind: str = "rms"
    """rms; or layer: (x − mean(x)) takes the place of x, and `bias` is added."""
    eps: float = 1e-6
    """Not negative."""
    bias: Array | None = None
    """[K], of a layer norm."""
    weight_offset: float = 0.0
    """1 in Gemma, whose checkpoints store the weight less 1."""
    residual: Array | None = None
    """The residual stream, of the shape and type of x: x is added to it in place, and the sum is normalized."""


class PackedFile:
    """Packed weights in a file, read-only and memory-mapped: what save_packed() and `nibble pack` write. Nothing but the header is read
    until a weight is loaded.

    Raises NotFound, IoError, CorruptData for what is no such file, Unsupported for another version of the format or of a layout: pack again.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = _core.PackedFile(os.fspath(path))

    @classmethod
    def beside(cls, checkpoint: Checkpoint) -> PackedFile | None:
        """The one beside a checkpoint, MODEL.nibble for MODEL or MODEL.safetensors, or None. Raises what opening it does."""
        file = _core.PackedFile.beside(checkpoint)
        if file is None:
            return None
        self = cls.__new__(cls)
        self._file = file
        return self

    @property
    def path(self) -> str:
        """What it was opened with."""
        return self._file.path

    @property
    def library_version(self) -> str:
        """The version of nibble that wrote it."""
        return self._file.library_version

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint that it was packed from; "" when that is not recorded."""
        return self._file.checkpoint

    @property
    def modules(self) -> list[PackedModule]:
        """Its weights, in the order that they were saved."""
        return self._file.modules

    def load(self, name: str, backend: str = "cpu") -> PackedWeight:
        """A weight: in host memory, where its bytes are the mapped file, or of backend "cuda" copied to the current GPU.

        Raises NotFound, IoError when the file has been truncated, CorruptData, and Unsupported without a GPU.
        """
        return PackedWeight(self._file.load(name, backend))

    def compare(self, checkpoint: Checkpoint) -> dict[str, str]:
        """Weights whose layer in the checkpoint has changed since they were packed, or is gone, by name, with a line on each."""
        return dict(self._file.compare(checkpoint))

    def __repr__(self) -> str:
        return f"PackedFile({self.path!r}, {len(self.modules)} weights)"


def save_packed(
    path: str | os.PathLike[str], weights: Mapping[str, PackedWeight], *, checkpoint: Checkpoint | None = None, overwrite: bool = False
) -> None:
    """Writes packed weights into a file, whole or not at all; those of a GPU are copied to the host.

    checkpoint: where they come from; by its layers of the same names the file knows later whether it has changed.
    Raises AlreadyExists unless `overwrite`, InvalidArgument for names with control characters or of more than 1000 bytes, IoError.
    """
    _core.save_packed(os.fspath(path), [(name, weight._weight) for name, weight in weights.items()], checkpoint, overwrite)


def packed_weight(
    checkpoint: Checkpoint, layer: str | Module, file: PackedFile | None = None, *, backend: str = "cpu", a_dtype: Any = "f32",
    act_scheme: str = "", layout: str = "", kernel: str = "", m_max: int = 1 << 13, accumulation: str = "fast",
) -> tuple[PackedWeight, str]:  # fmt: skip
    """pack(checkpoint.read(layer), …), or the same weight from `file` where that has it, in the layout that pack() would choose, of a layer
    that has not changed since. The text is "" then, else why it was packed now.

    Raises what pack(), Checkpoint.read() and PackedFile.load() do.
    """
    weight, packed_because = _core.packed_weight(
        checkpoint, layer if isinstance(layer, str) else layer.name, None if file is None else file._file, backend=backend,
        a_dtype=_arrays.token(a_dtype), act_scheme=act_scheme, layout=layout, kernel=kernel, m_max=m_max, accumulation=accumulation,
    )  # fmt: skip
    return PackedWeight(weight), packed_because


def explain(
    q: QuantTensor, *, gpu: str = "", backend: str = "cpu", a_dtype: Any = "f32", act_scheme: str = "", m_max: int = 1 << 13,
    accumulation: str = "fast", out_dtype: Any = None,
) -> list[Bucket]:  # fmt: skip
    """What pack() and linear() would decide for q: which kernels for which M up to m_max, their predicted times, and why the others do not
    run. Nothing is packed.

    gpu: "h100" or "h200", a GPU that need not be there, in place of a backend. out_dtype: that of linear(), a_dtype or f32 for codes.
    Raises NotFound for another GPU, and what pack() does.
    """
    token = _arrays.token(a_dtype)
    out = _arrays.token(out_dtype) if out_dtype is not None else token if token in ("f32", "f16", "bf16") else "f32"
    return _core.explain(
        q, backend=backend, gpu=gpu, a_dtype=token, m_max=m_max, out=out, act_scheme=act_scheme, accumulation=accumulation
    )


def _spec(weight: PackedWeight) -> dict[str, Any]:
    """What a weight was packed for, as pack() takes it."""
    spec = {name: getattr(weight, name) for name in ("a_dtype", "m_max", "act_scheme", "accumulation")}
    glu, glu_limit, glu_offset = weight._weight.glu
    return {**spec, "glu": glu, "glu_limit": glu_limit, "glu_offset": glu_offset} if glu else spec


def _repack(q: QuantTensor, backend: str, layout: str, spec: dict[str, Any]) -> PackedWeight:
    return pack(q, backend=backend, layout=layout, **spec)


_FIELDS = ("scheme", "codes", "scales", "zeros", "scale2", "g_idx", "prescale", "bias", "static_acts", "act_limit", "filter")


def _fields(q: QuantTensor, **replaced: Any) -> dict[str, Any]:
    """QuantTensor(**_fields(q)) == q."""
    return {**{name: getattr(q, name) for name in _FIELDS}, **replaced}


def _restore(fields: dict[str, Any]) -> QuantTensor:
    return QuantTensor(**fields)


copyreg.pickle(QuantTensor, lambda q: (_restore, (_fields(q),)))


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (int(value[0]), int(value[1])) if hasattr(value, "__len__") else (value, value)  # type: ignore[index, return-value]


def _padding(value: int | Sequence[int]) -> tuple[int, int, int, int]:
    """(top, bottom, left, right), from that, (height, width) or one number."""
    if hasattr(value, "__len__") and len(value) == 4:  # type: ignore[arg-type]
        return tuple(int(v) for v in value)  # type: ignore[return-value, union-attr]
    h, w = _pair(value)
    return h, h, w, w


def _covered(size: int, before: int, after: int, filter: int, stride: int, dilation: int) -> int:
    """How many outputs there are along a dimension."""
    return (size + before + after - dilation * (filter - 1) - 1) // stride + 1


class PackedWeight:
    """A weight W[n,k] in the byte order its kernels stream, with the plans that ran on it. Made by pack(); immutable and shareable."""

    def __init__(self, weight: _core.PackedWeight) -> None:
        self._weight = weight
        self.a_dtype: str = weight.a_dtype
        self.m_max: int = weight.m_max
        self.act_scheme: str = weight.act_scheme
        self.accumulation: str = weight.accumulation
        self.n: int = weight.n
        self.k: int = weight.k
        self.scheme: str = weight.scheme
        self.scale: str = weight.scale
        self.filter: tuple[int, int] = weight.filter
        self.layout: str = weight.layout
        self.backend: str = weight.backend
        self.device = ("cuda", weight.gpu) if weight.backend == "cuda" else _arrays.CPU
        self.shape: tuple[int, int] = (weight.n, weight.k)
        self.has_bias: bool = weight.has_bias
        self.act_order: bool = weight.act_order
        self.nbytes: int = weight.nbytes

    def __repr__(self) -> str:
        act = f"{self.act_scheme}_" if self.act_scheme else ""
        return f"PackedWeight({act}{self.scheme}, n={self.n}, k={self.k}, layout={self.layout!r}, backend={self.backend!r})"

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self  # immutable

    def __reduce__(self) -> Any:
        return _repack, (self.unpack(), self.backend, self.layout, _spec(self))

    def unpack(self) -> QuantTensor:
        """The QuantTensor it was packed from, bit for bit."""
        return self._weight.unpack()

    def header(self) -> builtins.bytes:
        """All of it but `bytes`: layout, scheme, sizes, what it was packed for, bias, ... as JSON behind a prefix of 16 bytes, filled up with
        spaces to a multiple of 256 bytes; from_bytes() takes it."""
        return self._weight.header()

    @property
    def bytes(self) -> Array:
        """The packed bytes where they are, read-only: a NumPy array, or of a weight on a GPU an array with `__dlpack__`."""
        return self._weight.bytes

    @staticmethod
    def from_bytes(header: builtins.bytes, bytes: Array) -> PackedWeight:
        """The weight of a header() and its bytes, uint8 [nbytes], which it reads where they are, and keeps: in host memory at a multiple of 64
        bytes, on the current GPU at a multiple of 256. They must not change.

        Raises CorruptData where the header or the number of bytes is wrong, Unsupported for a version or a layout that this build does not
        have, or that is not for that memory, InvalidArgument for bytes that are not aligned.
        """
        gpu = _arrays.framework(bytes).device(bytes)[0] == "cuda"
        return PackedWeight(_core.PackedWeight.from_bytes(header, _arrays.export(bytes), gpu=gpu, keep=True))

    def linear(
        self,
        x: Array,
        *,
        bias: Array | bool | None = None,
        activation: str = "none",
        clamp: tuple[float, float] = (0.0, 6.0),
        negative_slope: float = 0.01,
        gate: Array | None = None,
        residual: Array | None = None,
        row_scale: Array | None = None,
        col_scale: Array | None = None,
        a_scale: Array | None = None,
        a_zero: Array | None = None,
        act_scheme: str | None = None,
        accumulation: str | None = None,
        out_dtype: Any = None,
        out_scale: float | Array = 1.0,
        out_zero: int | Array = 0,
        out_range: tuple[int, int] | None = None,
        sum_bias: Array | None = None,
        out: Array | None = None,
        stream: Any = None,
        kernel: str = "",
        allow_reference: bool = True,
        next: PackedWeight | None = None,
        norm: Norm | None = None,
        plans: PlanCache | None = None,
    ) -> Array:
        """y[..., N] = act(row_scale · col_scale · (x[..., K] · Wᵀ) + bias) ∘ gate + residual, rounded to out_dtype.

        Of a weight packed with glu, act(first half) · second half, [..., N/2], takes the place of act(...); gate and residual have its shape.

        x: f32, f16 or bf16, of any strides (what is no matrix in memory is copied); or codes, int8 or e4m3, with their a_scale (f32 [1],
        [M] or [M,G]) and for zero points a_zero (int32, of the shape of a_scale; -128 ... 127, on a GPU unchecked; on the CPU any int32
        will do). A float32 a_zero holds offsets: x stands for x·a_scale + a_zero. x of uint8 is codes where an a_zero comes with it, or
        act_scheme has zero points, which are 0 ... 255 then; else bits of e4m3.
        bias: [N]; None: the weight's own, if it has one; False: none. gate, residual: [..., N]. row_scale [M], col_scale [N]: f32.
        activation: none, relu, relu6, clamp (to `clamp`), leaky_relu (with `negative_slope`), gelu_erf, gelu_tanh, quick_gelu
        (x·sigmoid(1.702·x)), silu, hardswish, sigmoid, tanh; all of them keep NaN.
        act_scheme, accumulation: in place of the weight's, "" for none of the former.
        out_dtype: f32, f16, bf16; int8 or uint8 (round(y / out_scale) + out_zero, within the type and out_range, both ends included; 0 of
        a NaN); int32, of W8A8 with x as codes: the integer sums, without scales; that of x, f32 for codes.
        out_scale, out_zero: numbers that a plan is made for; or arrays, f32 [1] or [N] and int32 [1], which may change with every call.
        sum_bias: int32 [N], of W8A8: added to the integer sums, before their scales.
        out: written and returned; last stride 1. stream: for CUDA, a cudaStream_t or a stream of torch or CuPy; the framework's current one.
        kernel: force one by name. allow_reference: False to fail rather than to run the slow reference.
        next: the weight of the call that follows on the same stream, which Hopper's kernels for up to 16 tokens ask for in L2 when
        they have asked for their own.
        norm: of a float x: it is normalized before anything else, with the residual stream added.
        plans: where the plan is kept, to be shared with other weights; the weight's own by default.

        Raises InvalidArgument with the values that do not fit; nothing has been written then.
        """
        return self._weight.linear(
            x, bias, activation, clamp, negative_slope, gate, residual, row_scale, col_scale, a_scale, a_zero, act_scheme, accumulation,
            out_dtype, out_scale, out_zero, out_range, sum_bias, out, stream, kernel, allow_reference,
            None if next is None else next._weight,
            None if norm is None else (norm.kind, norm.weight, norm.eps, norm.bias, norm.weight_offset, norm.residual),
            plans,
        )  # fmt: skip

    __call__ = linear

    def conv(
        self,
        x: Array,
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        channels_last: bool | None = None,
        bias: Array | bool | None = None,
        activation: str = "none",
        clamp: tuple[float, float] = (0.0, 6.0),
        negative_slope: float = 0.01,
        gate: Array | None = None,
        residual: Array | None = None,
        col_scale: Array | None = None,
        a_scale: Array | None = None,
        a_zero: Array | None = None,
        act_scheme: str | None = None,
        accumulation: str | None = None,
        out_dtype: Any = None,
        out_scale: float | Array = 1.0,
        out_zero: int | Array = 0,
        out_range: tuple[int, int] | None = None,
        sum_bias: Array | None = None,
        out: Array | None = None,
        stream: Any = None,
        kernel: str = "",
        allow_reference: bool = True,
        next: PackedWeight | None = None,
        plans: PlanCache | None = None,
    ) -> Array:
        """y[B,Co,Oh,Ow] = act(col_scale · conv2d(x[B,C,H,W], W) + bias) ∘ gate + residual, of a weight made by quantize_conv().

        x: the order of its dimensions is B, C, H, W; in memory it is NCHW or NHWC, as its strides say (a NumPy array [B,H,W,C] is
        x.transpose(0, 3, 1, 2)). f32, f16, bf16; or int8 codes with an a_scale of one element, and an a_zero [1] for zero points:
        -128 ... 127, as padding is filled with that code, of uint8 0 ... 255; without padding as in linear().
        stride, dilation: a number or (height, width). padding, of zeros: a number, (height, width) or (top, bottom, left, right).
        channels_last: whether the result is NHWC in memory; by default as x is, and as `out` where that is given. gate, residual
        [B,Co,Oh,Ow] lie as the result does.
        The rest is as in linear(). Plans are kept for each size of image, by the weight or in `plans`.

        Raises InvalidArgument, for a geometry with the size of the output that follows from it; nothing has been written then.
        """
        return self._weight.conv(
            x, _pair(stride), _padding(padding), _pair(dilation), groups, channels_last, bias, activation, clamp,
            negative_slope, gate, residual, col_scale, a_scale, a_zero, act_scheme, accumulation, out_dtype, out_scale, out_zero, out_range,
            sum_bias, out, stream, kernel, allow_reference,
            None if next is None else next._weight, plans,
        )  # fmt: skip

    def dequantize(self, dtype: Any = "f32", *, transposed: bool = False, out: Array | None = None, stream: Any = None) -> Array:
        """W [N,K], or [K,N] when transposed, as f32, f16 or bf16: bit for bit what the scheme says, rounded once.

        The result is NumPy's. A weight on the GPU needs an `out` there.
        """
        if out is None and self.backend == "cuda":
            raise InvalidArgument("the weight is in device memory: pass out=, an array there")
        if out is None:
            out = _arrays.NUMPY.empty((self.k, self.n) if transposed else (self.n, self.k), _arrays.token(dtype), None, None)
        self._weight.dequantize(out, transposed, stream)
        return out

    def explain(
        self, a_dtype: Any = None, m_max: int | None = None, *, act_scheme: str | None = None, accumulation: str | None = None, out_dtype: Any = None
    ) -> list[Bucket]:
        """Which kernels run for which M up to m_max, what they are predicted to cost, and why the others were refused.

        What is not given is as the weight was packed for; out_dtype is that of linear(): a_dtype, f32 for codes.
        """
        token = self.a_dtype if a_dtype is None else _arrays.token(a_dtype)
        out = _arrays.token(out_dtype) if out_dtype is not None else token if token in ("f32", "f16", "bf16") else "f32"
        return self._weight.explain(
            token, self.m_max if m_max is None else m_max, out, self.act_scheme if act_scheme is None else act_scheme,
            accumulation or self.accumulation,
        )  # fmt: skip

    def workspace_bytes(
        self, m: int, a_dtype: Any = None, *, act_scheme: str | None = None, accumulation: str | None = None, out_dtype: Any = None
    ) -> int:
        """The scratch memory of linear() for m tokens, in bytes: on a GPU it comes from the framework of x, during the call.

        What is not given is as in explain(). Raises InvalidArgument for m outside 1 ... 2^30.
        """
        token = self.a_dtype if a_dtype is None else _arrays.token(a_dtype)
        out = _arrays.token(out_dtype) if out_dtype is not None else token if token in ("f32", "f16", "bf16") else "f32"
        return self._weight.workspace_bytes(
            m, token, out, self.act_scheme if act_scheme is None else act_scheme, accumulation or self.accumulation
        )


class Linear:
    """A layer: a packed weight with its epilogue fixed. Linear(w, activation="silu")(x) is w.linear(x, activation="silu")."""

    def __init__(self, weight: PackedWeight | QuantTensor, **epilogue: Any) -> None:
        self.weight = weight if isinstance(weight, PackedWeight) else pack(weight)
        self.epilogue = epilogue

    def __call__(self, x: Array, **more: Any) -> Array:
        return self.weight.linear(x, **{**self.epilogue, **more})


class Conv:
    """A layer: a packed weight with its geometry and epilogue fixed. Conv(w, padding=1)(x) is w.conv(x, padding=1)."""

    def __init__(self, weight: PackedWeight | QuantTensor, **options: Any) -> None:
        self.weight = weight if isinstance(weight, PackedWeight) else pack(weight)
        self.options = options

    def __call__(self, x: Array, **more: Any) -> Array:
        return self.weight.conv(x, **{**self.options, **more})


def quantize_activations(
    x: Array,
    scheme: str = "s8r",
    *,
    scale: float | None = None,
    zero: int = 0,
    limit: float | None = None,
    prescale: Array | None = None,
    codes: Array | None = None,
    scales: Array | None = None,
    zeros: Array | None = None,
    stream: Any = None,
) -> tuple[Array, Array | None, Array | None]:
    """x [..., K] (f32, f16, bf16) → (codes [..., K], scales, zeros), with x ≈ (codes − zeros)·scales.

    scheme: "s8r" int8 per token: scales f32 [...]; "s8zr" with zero points: zeros s32 [...]; "e4m3r" FP8; "e4m3g128" in groups: scales
    [..., G]; "s8t", "s8zt", "e4m3t" with the `scale` (and `zero`) known beforehand: no scales, no zeros. "s8or", "s8og32":
    zeros are float32 offsets, and x ≈ codes·scales + zeros.
    limit: no scale reaches further. prescale: f32 [K], multiplies x first. codes, scales, zeros: written in place of new arrays; scales
    may have any strides. Parts a scheme does not have are None.
    """
    return _core.quantize_activations(
        x, scheme=scheme, scale=scale, zero=zero, limit=limit, prescale=prescale, codes=codes, scales=scales, zeros=zeros, stream=stream
    )


def verify(
    q: QuantTensor, a_dtype: Any = "f32", m: int = 4, *, act_scheme: str = "", out_dtype: Any = None, backend: str = "cpu", kernel: str = "",
    seed: int = 1, sample_columns: int = 0, accumulation: str = "fast",
) -> VerifyReport:  # fmt: skip
    """Packs q, runs it on m rows of seeded random activations and compares with a double-precision oracle, within derived bounds.

    The report is true when it passed. sample_columns: check that many output columns, 0 all.
    """
    token = _arrays.token(a_dtype)
    return _core.verify(
        q, a_dtype=token, m=m, out=_arrays.token(out_dtype) if out_dtype is not None else token, act_scheme=_core.act_scheme(act_scheme),
        backend=backend, kernel=kernel, seed=seed, sample_columns=sample_columns, accumulation=accumulation,
    )  # fmt: skip


def verify_conv(
    q: QuantTensor, image: Sequence[int], a_dtype: Any = "f32", batch: int = 2, *, stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1, groups: int = 1, channels_last: bool = False, act_scheme: str = "", out_dtype: Any = None,
    backend: str = "cpu", kernel: str = "", seed: int = 1, sample_columns: int = 0, accumulation: str = "fast",
) -> VerifyReport:  # fmt: skip
    """The same for a weight made by quantize_conv(), on a batch of seeded random images of (height, width), pixel by pixel."""
    token = _arrays.token(a_dtype)
    return _core.verify_conv(
        q, image=_pair(image), stride=_pair(stride), padding=_padding(padding), dilation=_pair(dilation), groups=groups,
        channels_last=channels_last, a_dtype=token, batch=batch, out=_arrays.token(out_dtype) if out_dtype is not None else token,
        act_scheme=_core.act_scheme(act_scheme), backend=backend, kernel=kernel, seed=seed, sample_columns=sample_columns,
        accumulation=accumulation,
    )  # fmt: skip


def doctor(measure: bool = False) -> dict[str, Any]:
    """This machine as nibble sees it: CPU, instruction sets, caches, GPU (or why there is none), what this build holds.

    measure: also take the CPU's roofline, in less than a second.
    """
    report: dict[str, Any] = {"version": __version__, **_core.device()}
    try:
        report["gpu"] = _core.gpu()
    except Unsupported as reason:
        report["gpu"] = None
        report["gpu_reason"] = str(reason)
    report["kernels"] = len(kernels())
    report["formats"] = [f.name for f in formats()]
    if measure:
        report["roofline"] = _core.roofline()
    return report


from .experts import ExpertLayer, PackedExperts, expert_layers, grouped, moe, pack_expert_layer, pack_experts, route
