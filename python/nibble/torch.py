"""nibble for PyTorch: operators that torch.compile understands, a module, and a pass that converts a model in place.

    import nibble.torch
    nibble.torch.convert(model, "u4b8g128")          # float layers are quantized; AWQ, GPTQ, ... layers keep their numbers
    nibble.torch.fuse(model)                         # the layers of decoder blocks are joined, with norms, products and additions

A packed weight is a tensor of bytes (`to_tensor`), which modules hold as a buffer and operators take, with the sizes of the result:

    torch.ops.nibble.linear(x, weight, n, bias, activation, out_dtype) -> y[..., N]
    torch.ops.nibble.fused_linear(x, weight, n, activation, glu, residual, norm, eps, norm_offset, next) -> y[..., N], of a glu N/2
    torch.ops.nibble.scaled_linear(codes, a_scale, a_zero, weight, n, bias, activation, out_dtype) -> y[..., N]
    torch.ops.nibble.conv2d(x, weight, n, filter, stride, padding, dilation, groups, bias, activation, out_dtype) -> y[B, Co, Oh, Ow]
    torch.ops.nibble.dequantize(weight, n, k, dtype) -> W[N, K]
    torch.ops.nibble.quantize_activations(x, scheme) -> (codes, scales, zeros)
    torch.ops.nibble.moe(x, ids, weights, gate_up, down, n, activation) -> y[..., N]
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import re
import weakref
from typing import Any, Callable, Mapping, Optional, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.nn.grad import conv2d_input

import nibble
from nibble import _arrays, _core, _torch_threads
from nibble.errors import InvalidArgument, Unsupported

__all__ = [
    "ColumnParallelLinear", "Converted", "Fused", "FusedLinear", "ParallelExperts", "QuantConv2d", "QuantExperts", "QuantLinear",
    "RowParallelLinear", "TorchWeight", "convert", "from_tensor", "fuse", "quantize_activations", "read_module", "shard_experts", "shard_inputs",
    "shard_outputs", "split_mlp", "to_tensor", "unfuse",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


_COMPUTED = (torch.float32, torch.float16, torch.bfloat16)


_torch_threads.share()

# --- weights as tensors ---------------------------------------------------------------------------------------------------------

_ALIGNMENT = {"cpu": 64, "cuda": 256}  # of packed bytes


def to_tensor(weight: nibble.PackedWeight) -> Tensor:
    """The weight as one tensor of bytes, uint8, where the weight is: PackedWeight.header() and after it the packed bytes.

    It can be copied, saved and sent like every tensor; it is equal for equal weights that were packed for the same layout.
    """
    header = np.frombuffer(weight.header(), np.uint8)
    with torch.inference_mode(False):  # other tensors have no versions
        if weight.backend == "cuda":
            packed = torch.empty(header.size + weight.nbytes, dtype=torch.uint8, device=weight.device[0] + f":{weight.device[1]}")
            packed[: header.size] = torch.tensor(header, device=packed.device)
            packed[header.size :] = torch.from_dlpack(weight.bytes)
            return packed
        packed = _host_bytes(header.size + weight.nbytes)
        packed.numpy()[: header.size] = header
        packed.numpy()[header.size :] = weight.bytes
        return packed


def _host_bytes(size: int) -> Tensor:
    """Like torch.empty; large ones ask for huge pages, with which a core misses fewer translations while it streams a weight."""
    if size < 1 << 21 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def from_tensor(packed: Tensor) -> TorchWeight:
    """The weight of a tensor that to_tensor() made, whose memory it reads and keeps; of a tensor that does not begin at a multiple of 64
    bytes (on a GPU 256), a copy.

    Raises CorruptData for other bytes, Unsupported for a layout that is not for the tensor's device.
    """
    return TorchWeight(packed, packed.new_empty(0, dtype=_usual_type(_weight(packed))))


def _copied(packed: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return (_host_bytes(packed.numel()) if packed.device.type == "cpu" else torch.empty_like(packed)).copy_(packed)


def _placed(packed: Tensor, device: torch.device) -> Tensor:
    """The same weight where the device is, packed anew unless its layout is for there; itself where nothing is to be done."""
    if packed.is_meta or device.type == "meta":
        return packed.to(device)
    layouts = {layout.name: layout.backend for layout in nibble.layouts()}
    if layouts.get(_core.packed_layout(_header(packed))) == device.type:
        placed = packed.to(device)
        return placed if placed.data_ptr() % _ALIGNMENT[device.type] == 0 else _copied(placed)
    there = _copied(packed.cpu())  # kept: the weight reads its memory
    weight = _weight(there)
    return to_tensor(_pack(weight.unpack(), device, **nibble._spec(weight)))


def _header(packed: Tensor) -> bytes:
    if packed.dtype != torch.uint8 or packed.ndim != 1 or not packed.is_contiguous():
        raise InvalidArgument(f"a packed weight is a dense vector of torch.uint8, got {packed.dtype} of shape {tuple(packed.shape)}; see to_tensor")
    size = _core.packed_header_size(packed[: _core.packed_prefix].cpu().numpy().tobytes())
    return packed[:size].cpu().numpy().tobytes()


# By address: the storage, which is not kept; its version; and the weight that reads its memory.
_bound: dict[int, tuple[weakref.ref[Any], int, nibble.PackedWeight]] = {}


def _version(packed: Tensor) -> int:
    """Changes with the contents; those of an inference tensor are taken not to change."""
    try:
        return packed._version
    except RuntimeError:
        return -1


def _weight(packed: Tensor) -> nibble.PackedWeight:
    """The weight of a tensor, found once: by its address, and valid while its storage lives and is not written to."""
    address = packed.data_ptr()
    found = _bound.get(address)
    if found is not None:
        storage, version, weight = found
        if storage() is packed.untyped_storage() and version == _version(packed):
            return weight
    header = _header(packed)
    on_gpu = packed.is_cuda
    aligned = address % _ALIGNMENT[packed.device.type] == 0
    bytes_ = (packed if aligned else _copied(packed))[len(header) :]  # archives may hold tensors anywhere: the weight keeps a copy then
    with torch.cuda.device(packed.device) if on_gpu else contextlib.nullcontext():
        core = _core.PackedWeight.from_bytes(header, _arrays.export(bytes_), gpu=on_gpu, keep=not aligned)

    def forget(storage: Any) -> None:
        if (entry := _bound.get(address)) is not None and entry[0] is storage:
            del _bound[address]

    weight = nibble.PackedWeight(core)
    _bound[address] = weakref.ref(packed.untyped_storage(), forget), _version(packed), weight
    return weight


def _checked(packed: Tensor, n: int) -> nibble.PackedWeight:
    weight = _weight(packed)
    if weight.n != n:
        raise InvalidArgument(f"n={n}, but the weight is W[{weight.n},{weight.k}]")
    return weight


# --- operators ------------------------------------------------------------------------------------------------------------------

_library = torch.library.Library("nibble", "DEF")
_below_autograd = torch._C._AutoDispatchBelowAutograd
_DEVICES = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _autocast(name: str) -> None:
    """Under autocast x, the first argument, and with it the result become of its type, as those of torch.nn.functional.linear do."""
    op = getattr(torch.ops.nibble, name).default
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):

        def cast(x: Tensor, *args: Any, device: str = device) -> Any:
            if x.dtype in _COMPUTED:
                x = x.to(torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return op(x, *args)

        _library.impl(name, cast, key)



def _dual(x: Any) -> bool:
    """Whether it carries a tangent of forward-mode differentiation."""
    return isinstance(x, Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def _batched(name: str, rows: Sequence[int]) -> None:
    """torch.vmap of the operator: the dimension becomes one of rows, of which results do not depend on each other. rows: the arguments that
    have a row for each of the result."""
    if not hasattr(torch.library, "register_vmap"):
        return
    op = getattr(torch.ops.nibble, name).default
    names = [argument.name for argument in op._schema.arguments]

    def fold(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        def front(i: int) -> Any:
            x, dim = args[i], in_dims[i]
            if i not in rows:
                if dim is not None:
                    raise NotImplementedError(
                        f"torch.vmap over {names[i]} of nibble::{name}: a call has one layer; batch {' or '.join(names[row] for row in rows)}, "
                        "or call the layers one by one"
                    )
                return x
            if x is None:
                return x
            return x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        return op(*map(front, range(len(args)))), 0

    torch.library.register_vmap(f"nibble::{name}", fold, lib=_library)


def _operator(
    schema: str, run: Callable[..., Any], fake: Callable[..., Any],
    gradient: tuple[Callable[[Any, tuple[Any, ...]], None], Callable[[Any, Tensor], tuple[Any, ...]]] | None = None,
) -> None:  # fmt: skip
    """Registers an operator that changes none of its arguments: what torch.library's custom_op and register_autograd do, in a fraction of
    the time they add to each call. gradient: what keeps things for the backward pass, from the arguments; and that pass."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{name}", fake, lib=_library)
    if gradient is None:
        return
    keep, backward_pass = gradient
    op = getattr(torch.ops.nibble, name).default
    defaults = tuple(argument.default_value for argument in op._schema.arguments)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, call: Callable[..., Any], *args: Any) -> Any:
            keep(ctx, args)
            return call(*args)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return None, *backward_pass(ctx, gradient)

    class OfLevel(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch.enable_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(True):  # of the transforms around this one
                return Function.forward(ctx, *args)

        backward = Function.backward

    def apply_transformed(*args: Any) -> Any:
        """Function.apply in a transform of torch.func, which has called `autograd` for its own level."""
        with enable_single_level_autograd_function():
            return OfLevel.apply(*args)

    def dispatch(*args: Any) -> Any:
        with _below_autograd():
            return op(*args)

    def autograd(keys: Any, *args: Any) -> Any:
        args += defaults[len(args) :]  # the dispatcher leaves them out
        if torch.autograd.forward_ad._current_level >= 0 and any(map(_dual, args)):
            raise NotImplementedError(
                f"nibble::{name} has no forward-mode derivative (torch.func.jvp, jacfwd): use torch.func.vjp or jacrev, or multiply by the "
                "layer's dequantize() instead"
            )
        plain = (keys & torch._C._after_autograd_keyset).highestPriorityTypeId() in _DEVICES
        call = run if plain else dispatch  # of plain tensors the dispatcher would come to `run`
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return (Function.apply if torch._C._functorch.peek_interpreter_stack() is None else apply_transformed)(call, *args)
        return call(*args)

    _library.impl(name, autograd, "Autograd", with_keyset=True)


def _linear(
    x: Tensor, weight: Tensor, n: int, bias: Optional[Tensor] = None, activation: str = "none", out_dtype: Optional[torch.dtype] = None
) -> Tensor:
    if x.ndim > 4:
        return _linear(x.flatten(0, -2), weight, n, bias, activation, out_dtype).unflatten(0, x.shape[:-1])
    return _checked(weight, n).linear(x, bias=bias, activation=activation, out_dtype=out_dtype)


def _fake_linear(
    x: Tensor, weight: Tensor, n: int, bias: Any = None, activation: str = "none", out_dtype: Optional[torch.dtype] = None
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, ctx.weight, ctx.n, bias, ctx.activation, _ = inputs
    ctx.k, ctx.x_dtype, ctx.bias_dtype = x.shape[-1], x.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    if ctx.activation != "none":
        raise NotImplementedError(f"nibble::linear has no gradient through {ctx.activation}; apply it to the result instead")
    w = torch.ops.nibble.dequantize(ctx.weight, ctx.n, ctx.k, gradient.dtype)
    bias = None if ctx.bias_dtype is None else gradient.reshape(-1, ctx.n).sum(0).to(ctx.bias_dtype)
    return (gradient @ w).to(ctx.x_dtype), None, None, bias, None, None


_operator(
    "linear(Tensor x, Tensor weight, int n, Tensor? bias=None, str activation='none', ScalarType? out_dtype=None) -> Tensor",
    _linear, _fake_linear, (_keep_for_backward, _backward),
)  # fmt: skip
_autocast("linear")
_batched("linear", (0,))


def _fused_linear(
    x: Tensor, weight: Tensor, n: int, activation: str = "none", glu: bool = False, residual: Optional[Tensor] = None,
    norm: Optional[Tensor] = None, eps: float = 1e-6, norm_offset: float = 0.0, next: Optional[Tensor] = None,
) -> Tensor:  # fmt: skip
    """n: the columns of the result. next: the weight of the call after this one."""
    if x.ndim > 4:
        flat = residual if residual is None else residual.flatten(0, -2)
        return _fused_linear(x.flatten(0, -2), weight, n, activation, glu, flat, norm, eps, norm_offset, next).unflatten(0, x.shape[:-1])
    w = _checked(weight, 2 * n if glu else n)
    if w._weight.glu[0] != glu:
        raise InvalidArgument(f"glu={glu}, but the weight was packed with glu={not glu}")
    norm_of_x = None if norm is None else nibble.Norm(norm, eps=eps, weight_offset=norm_offset)
    out_dtype = x.dtype if residual is None else residual.dtype
    following = None if next is None else _weight(next)
    return w.linear(x, activation=activation, residual=residual, norm=norm_of_x, out_dtype=out_dtype, next=following)


def _fake_fused_linear(
    x: Tensor, weight: Tensor, n: int, activation: str = "none", glu: bool = False, residual: Any = None, norm: Any = None, eps: float = 1e-6,
    norm_offset: float = 0.0, next: Any = None,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], n), dtype=x.dtype if residual is None else residual.dtype)


def _fused_linear_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, n: int, activation: str, glu: bool, norm: Optional[Tensor], eps: float, norm_offset: float
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the norm's weight, of which the latter is empty without a norm. Arithmetic is f32."""
    w = _weight(weight)
    rows, change = (t.reshape(-1, t.shape[-1]).float() for t in (x, gradient))
    # What is packed for a glu can only run as one.
    alone = _pack(w.unpack(), weight.device) if glu else w
    matrix = alone.dequantize(out=weight.new_empty(w.shape, dtype=torch.float32))
    scaled, factor, slope = rows, None, None  # x / rms, 1 / rms
    if norm is not None:
        factor, slope = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps), norm.float() + norm_offset
        scaled = rows * factor
    if glu or activation != "none":
        y = (scaled if slope is None else scaled * slope) @ matrix.T
        if w.has_bias:
            y += _to_torch(w.unpack().bias).to(y)
        if glu:
            first, second = y.chunk(2, -1)
            change = torch.cat([_through(activation, change * second, first), change * _ACTIVATIONS[activation](first)], -1)
        else:
            change = _through(activation, change, y)
    change = change @ matrix
    if slope is None:
        return change.to(x.dtype).view(x.shape), x.new_empty(0)
    of_norm = (change * scaled).sum(0).to(norm.dtype)
    change = change * slope
    change = factor * (change - scaled * (change * scaled).mean(-1, keepdim=True))
    return change.to(x.dtype).view(x.shape), of_norm


# Those of gated linear units in models, which have gradients.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": nn.functional.silu,
    "gelu_tanh": functools.partial(nn.functional.gelu, approximate="tanh"),
    "gelu_erf": nn.functional.gelu,
    "relu": nn.functional.relu,
}


def _through(activation: str, change: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, from that of the activation function's result."""
    if activation not in _ACTIVATIONS:
        raise NotImplementedError(f"nibble::fused_linear has no gradient through {activation}; apply it to the result instead")
    if activation == "silu":
        return torch.ops.aten.silu_backward(change, x)
    if activation.startswith("gelu"):
        return torch.ops.aten.gelu_backward(change, x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return change * (x > 0) if activation == "relu" else change


def _keep_for_fused_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, ctx.weight, ctx.n, ctx.activation, ctx.glu, residual, norm, ctx.eps, ctx.norm_offset, _ = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(x, norm)


def _fused_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, norm = ctx.saved_tensors
    of_x, of_norm = torch.ops.nibble.fused_linear_backward(
        gradient, x, ctx.weight, ctx.n, ctx.activation, ctx.glu, norm, ctx.eps, ctx.norm_offset
    )
    return of_x, None, None, None, None, gradient if ctx.has_residual else None, None if norm is None else of_norm, None, None, None


_operator(
    "fused_linear_backward(Tensor gradient, Tensor x, Tensor weight, int n, str activation, bool glu, Tensor? norm, float eps, "
    "float norm_offset) -> (Tensor, Tensor)",
    _fused_linear_backward,
    lambda gradient, x, weight, n, activation, glu, norm, *_: (x.new_empty(x.shape), x.new_empty(0) if norm is None else torch.empty_like(norm)),
)
_operator(
    "fused_linear(Tensor x, Tensor weight, int n, str activation='none', bool glu=False, Tensor? residual=None, Tensor? norm=None, "
    "float eps=1e-06, float norm_offset=0.0, Tensor? next=None) -> Tensor",
    _fused_linear, _fake_fused_linear, (_keep_for_fused_backward, _fused_backward),
)  # fmt: skip
_autocast("fused_linear")
_batched("fused_linear", (0, 5))


def _scaled_linear(
    codes: Tensor,
    a_scale: Tensor,
    a_zero: Optional[Tensor],
    weight: Tensor,
    n: int,
    bias: Optional[Tensor] = None,
    activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    return _checked(weight, n).linear(
        codes, a_scale=a_scale, a_zero=a_zero, bias=bias, activation=activation, out_dtype=out_dtype
    )


def _fake_scaled_linear(
    codes: Tensor, a_scale: Any, a_zero: Any, weight: Tensor, n: int, bias: Any = None, activation: str = "none",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    return codes.new_empty((*codes.shape[:-1], n), dtype=out_dtype)


_operator(
    "scaled_linear(Tensor codes, Tensor a_scale, Tensor? a_zero, Tensor weight, int n, Tensor? bias=None, str activation='none', "
    "ScalarType out_dtype=bfloat16) -> Tensor",
    _scaled_linear, _fake_scaled_linear,
)  # fmt: skip


def _conv2d(
    x: Tensor,
    weight: Tensor,
    n: int,
    filter: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    bias: Optional[Tensor] = None,
    activation: str = "none",
    out_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """padding: top, bottom, left, right. The result is NHWC in memory where x is."""
    w = _checked(weight, n)
    if w.filter != tuple(filter):
        raise InvalidArgument(f"filter={tuple(filter)}, but that of the weight is {w.filter}")
    return w.conv(
        x, stride=stride, padding=padding, dilation=dilation, groups=groups, bias=bias, activation=activation, out_dtype=out_dtype
    )


def _fake_conv2d(
    x: Tensor, weight: Tensor, n: int, filter: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int = 1, bias: Any = None, activation: str = "none", out_dtype: Optional[torch.dtype] = None,
) -> Tensor:  # fmt: skip
    b, _, h, width = x.shape
    h = nibble._covered(h, padding[0], padding[1], filter[0], stride[0], dilation[0])
    width = nibble._covered(width, padding[2], padding[3], filter[1], stride[1], dilation[1])
    if _arrays.channels_last(x):
        return x.new_empty((b, h, width, n), dtype=out_dtype or x.dtype).permute(0, 3, 1, 2)
    return x.new_empty((b, n, h, width), dtype=out_dtype or x.dtype)


def _keep_for_conv_backward(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, ctx.weight, ctx.n, ctx.filter, ctx.stride, ctx.padding, ctx.dilation, ctx.groups, bias, ctx.activation, _ = inputs
    ctx.x_shape, ctx.x_dtype, ctx.bias_dtype = x.shape, x.dtype, None if bias is None else bias.dtype


def _conv_backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    if ctx.activation != "none":
        raise NotImplementedError(f"nibble::conv2d has no gradient through {ctx.activation}; apply it to the result instead")
    b, c, height, width = ctx.x_shape
    k = math.prod(ctx.filter) * c // ctx.groups
    rows = torch.ops.nibble.dequantize(ctx.weight, ctx.n, k, gradient.dtype)
    w = rows.unflatten(1, (*ctx.filter, -1)).permute(0, 3, 1, 2)
    top, bottom, left, right = ctx.padding
    padded = (b, c, height + top + bottom, width + left + right)
    x = conv2d_input(padded, w, gradient, tuple(ctx.stride), 0, tuple(ctx.dilation), ctx.groups)
    bias = None if ctx.bias_dtype is None else gradient.sum((0, 2, 3)).to(ctx.bias_dtype)
    x = x[:, :, top : top + height, left : left + width].to(ctx.x_dtype)
    return x, *[None] * 7, bias, None, None


_operator(
    "conv2d(Tensor x, Tensor weight, int n, int[] filter, int[] stride, int[] padding, int[] dilation, int groups=1, Tensor? bias=None, "
    "str activation='none', ScalarType? out_dtype=None) -> Tensor",
    _conv2d, _fake_conv2d, (_keep_for_conv_backward, _conv_backward),
)  # fmt: skip
_autocast("conv2d")


def _dequantize(weight: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    w = _checked(weight, n)
    if w.k != k:
        raise InvalidArgument(f"k={k}, but the weight is W[{w.n},{w.k}]")
    return w.dequantize(out=weight.new_empty((n, k), dtype=dtype))


def _fake_dequantize(weight: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((n, k), dtype=dtype)


_operator("dequantize(Tensor weight, int n, int k, ScalarType dtype) -> Tensor", _dequantize, _fake_dequantize)


def quantize_activations(x: Tensor, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    """As nibble.quantize_activations, for the dynamic schemes; zeros is empty where the scheme has none."""
    return torch.ops.nibble.quantize_activations(x, scheme)


def _quantize_activations(x: Tensor, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales, zeros = nibble.quantize_activations(x, scheme)
    assert scales is not None  # or it has been refused
    return codes, scales, zeros if zeros is not None else x.new_empty((0,), dtype=torch.int32)


def _fake_quantize_activations(x: Tensor, scheme: str) -> tuple[Tensor, Tensor, Tensor]:
    name = _core.act_scheme(scheme)
    codes = torch.float8_e4m3fn if name.startswith("e4m3") else torch.int8
    group = re.search(r"g(\d+)$", name)
    scales = (*x.shape[:-1], -(-x.shape[-1] // int(group[1]))) if group else x.shape[:-1]
    zeros = scales if "z" in name or "o" in name else (0,)
    zero_type = torch.float32 if "o" in name else torch.int32
    return x.new_empty(x.shape, dtype=codes), x.new_empty(scales, dtype=torch.float32), x.new_empty(zeros, dtype=zero_type)


_operator(
    "quantize_activations(Tensor x, str scheme) -> (Tensor, Tensor, Tensor)", _quantize_activations, _fake_quantize_activations
)


# --- a layer --------------------------------------------------------------------------------------------------------------------


def _eager(x: Tensor) -> bool:
    """Whether the call may bypass the operator: no compiler or other tracer, no gradient or transform of torch.func, no autocast, no subclass
    such as a fake tensor, and no more dimensions than nibble has."""
    return not (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or x.requires_grad
        or torch._C._is_any_autocast_enabled()
        or torch.utils._python_dispatch.is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
        or x.ndim > 4
    )


class TorchWeight(nibble.PackedWeight):
    """The packed weight of a module, which has what models ask of the weight of a torch.nn.Linear: shape, dtype, device.

    dtype is the one the module computes in, as of the float weight it took the place of: `x.to(layer.weight.dtype)` is what such a layer
    would have been given.
    """

    shape: torch.Size  # type: ignore[assignment]
    device: torch.device  # type: ignore[assignment]

    def __init__(self, packed: Tensor, like: Tensor) -> None:
        super().__init__(_weight(packed)._weight)
        self._storage = packed.untyped_storage()  # whose memory is read
        self._packed, self._version, self._address = packed, _version(packed), packed.data_ptr()
        self.shape, self.dtype, self.device = torch.Size((self.n, self.k)), like.dtype, like.device

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """The layer's, [N]; None where it has none."""
        bias = self.unpack().bias if self.has_bias else None
        return None if bias is None else _to_torch(bias).to(self.device, self.dtype)


class _Quantized(nn.Module):
    """A layer with a packed weight: a buffer of bytes, `packed`."""

    packed: Tensor
    _where: Tensor

    def __init__(
        self, weight: nibble.PackedWeight | nibble.QuantTensor, *, act_scheme: str = "", accumulation: str = "fast", activation: str = "none",
        device: Any = "cpu", dtype: torch.dtype | None = None, **spec: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation = activation
        # Moves with the module, and changes its type with it.
        self.register_buffer("_where", torch.empty(0, device=device, dtype=dtype or _usual_type(weight)), persistent=False)
        if isinstance(weight, nibble.QuantTensor):
            weight = _pack(weight, torch.device(device), act_scheme=act_scheme, accumulation=accumulation, **spec)
        self.register_buffer("packed", to_tensor(weight))
        self._sizes = weight.n, weight.k, weight.filter
        self.__dict__["_seen"] = None

    @property
    def weight(self) -> TorchWeight:
        """The weight of `packed`."""
        seen = self.__dict__["_seen"]
        return seen if seen is not None and torch.compiler.is_compiling() else self._found()

    def _found(self) -> TorchWeight:
        """The weight as `packed` is now: what was found the last time, unless that has changed."""
        own = self.__dict__
        seen, packed = own["_seen"], own["_buffers"]["packed"]
        if seen is None or seen._packed is not packed or seen._address != packed.data_ptr() or seen._version != _version(packed):
            seen = own["_seen"] = TorchWeight(packed, self._where)
        return seen

    @property
    def bias(self) -> Tensor | None:
        """The weight's own, [N], to look at: it is added in f32 as it was given. None where there is none."""
        return self.weight.bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        packed = self.packed
        super()._apply(fn, recurse)
        self.__dict__["_seen"] = None  # which has a type and a device
        if self.packed.dtype != packed.dtype or self.packed.device != packed.device and not packed.is_meta:
            self.packed = _placed(packed, self.packed.device)  # bytes have no other type, and another device another layout
        return self

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [N,K]."""
        return torch.ops.nibble.dequantize(self.packed, *self._sizes[:2], dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Takes the packed weight of another layer of these sizes, whatever its scheme and layout are."""
        name = prefix + "packed"
        packed = state_dict.get(name)
        if packed is None:
            missing_keys.extend([name] if strict else [])
        else:
            try:
                self.packed = self._fitting(packed, bool(local_metadata.get("assign_to_params_buffers")))
            except nibble.Error as problem:
                error_msgs.append(f"{name}: {problem}")
        own = tuple(f"{prefix}{child}." for child in self._modules)  # which look at theirs
        unexpected_keys.extend(
            key for key in state_dict if strict and key.startswith(prefix) and key != name and not key.startswith(own)
        )

    def _fitting(self, packed: Tensor, keep: bool) -> Tensor:
        """`packed`, or a copy of it, where this layer is. keep: the tensor itself where that is possible, also in place of one on meta."""
        if not keep and self.packed.is_meta:
            raise InvalidArgument("the layer is on the meta device; load with assign=True")
        placed = _placed(packed, packed.device if keep else self.packed.device)
        weight = _weight(placed)
        sizes = weight.n, weight.k, weight.filter
        if sizes != self._sizes:
            (n, k, filter), (n_here, k_here, filter_here) = sizes, self._sizes
            raise InvalidArgument(f"W[{n},{k}] with a filter of {filter} is not a weight for W[{n_here},{k_here}] with {filter_here}")
        return _copied(placed) if placed is packed and not keep else placed

    def _described(self, shape: str) -> str:
        if self.packed.is_meta:
            return f"{shape}, device=meta"
        w = self.weight
        scheme = f"{w.act_scheme}_{w.scheme}" if w.act_scheme else w.scheme
        activation = "" if self.activation == "none" else f", activation={self.activation}"
        return f"{shape}, bias={w.has_bias}, scheme={scheme}{activation}, dtype={w.dtype}, device={w.device}, layout={w.layout}"


class QuantLinear(_Quantized):
    """y = act(x · Wᵀ + bias), with W quantized: what takes the place of a torch.nn.Linear.

    weight: packed, or a QuantTensor, which is packed for `device`. act_scheme: how x is quantized while running, "s8r", ...; "" not at all.
    dtype: of `weight.dtype`, which models read; by default that of the scales. The result is of x's type, under autocast of its type.
    accumulation: as nibble.pack has it. The bias is the weight's own. .to(device) packs anew; there is nothing to train, but gradients
    flow through to x.
    """

    @classmethod
    def from_float(cls, module: nn.Module, scheme: str = "u4b8g128", **options: Any) -> QuantLinear:
        """Of a torch.nn.Linear. Raises what nibble.quantize does."""
        act_scheme, weight_scheme = _parts(scheme)
        weight = _float_weight(module)
        if weight is None:
            raise InvalidArgument(f"{type(module).__name__} is no torch.nn.Linear of float32, float16 or bfloat16")
        return cls(_quantize(module, weight, weight_scheme), **{"act_scheme": act_scheme, "device": weight.device, "dtype": weight.dtype, **options})

    def __init__(self, weight: nibble.PackedWeight | nibble.QuantTensor, **options: Any) -> None:
        super().__init__(weight, **options)
        self.out_features, self.in_features = self._sizes[:2]

    def extra_repr(self) -> str:
        return self._described(f"in_features={self.in_features}, out_features={self.out_features}")

    def forward(self, x: Tensor) -> Tensor:
        if _eager(x):
            return self._found().linear(x, activation=self.activation)
        return torch.ops.nibble.linear(x, self.packed, self.out_features, None, self.activation, None)


class FusedLinear(_Quantized):
    """y = act(norm(x) · Wᵀ + bias) + residual: layers that read the same activations as one, with what is before and after them.

    parts: the layers by name, whose results are side by side; what nibble.join() refuses is refused. glu: of two layers, or of one with both
    halves: y = act(first half) ∘ second half + residual, of half as many channels. norm: an RMSNorm of K channels, of any class; it becomes
    a module of this one. activation, act_scheme, accumulation, device, dtype: as QuantLinear has them. The result is of x's type, with a
    residual of that one's. Under autocast x gets its type before the norm.
    Raises Unsupported for a module whose result is not that of an RMSNorm.
    """

    def __init__(
        self, parts: Mapping[str, nibble.QuantTensor], *, glu: bool = False, norm: nn.Module | None = None, **options: Any
    ) -> None:
        joined = nibble.join(list(parts.values()))
        if glu and joined.n % 2 != 0:
            raise InvalidArgument(f"a glu has two halves, but N={joined.n}")
        eps, norm_offset = (1e-6, 0.0) if norm is None else _rms_norm(norm, joined.k)
        a_dtype = options.get("dtype") or _usual_type(joined)
        super().__init__(joined, glu=glu, a_dtype=a_dtype if a_dtype in _COMPUTED else torch.float32, **options)
        self.glu, self.norm, self.eps, self.norm_offset = glu, norm, eps, norm_offset
        self.in_features, self.out_features = joined.k, joined.n // 2 if glu else joined.n
        self._parts = [(name, q.n, q.scheme, q.bias is not None) for name, q in parts.items()]

    def split(self) -> dict[str, nibble.QuantTensor]:
        """The layers by name, bit for bit as they were given."""
        joined, begin, parts = self.weight.unpack(), 0, {}
        for name, n, scheme, has_bias in self._parts:
            q = shard_outputs(joined, begin, begin + n)
            fields: dict[str, Any] = {} if has_bias else {"bias": None}
            if scheme != q.scheme:  # the scale of a tensor, once for each channel
                fields.update(scheme=scheme, scales=q.scales[:1], zeros=None if q.zeros is None else q.zeros[:1])
            parts[name] = _replace(q, **fields)
            begin += n
        return parts

    def forward(self, x: Tensor, residual: Tensor | None = None, next: _Quantized | None = None) -> Tensor:
        """x [..., in_features], residual [..., out_features] → y [..., out_features]. next: the layer after this one, as PackedWeight.linear
        has it."""
        norm = None if self.norm is None else self.norm.weight
        needs_gradient = torch.is_grad_enabled() and norm is not None and norm.requires_grad
        if not needs_gradient and _eager(x) and (residual is None or _eager(residual)):
            norm_of_x = None if norm is None else nibble.Norm(norm, eps=self.eps, weight_offset=self.norm_offset)
            out_dtype = x.dtype if residual is None else residual.dtype
            following = None if next is None else next._found()
            return self._found().linear(
                x, activation=self.activation, residual=residual, norm=norm_of_x, out_dtype=out_dtype, next=following
            )
        return torch.ops.nibble.fused_linear(
            x, self.packed, self.out_features, self.activation, self.glu, residual, norm, self.eps, self.norm_offset,
            None if next is None else next.packed,
        )  # fmt: skip

    def extra_repr(self) -> str:
        parts = "+".join(name for name, *_ in self._parts)
        glu = ", glu=True" if self.glu else ""
        return self._described(f"{parts}, in_features={self.in_features}, out_features={self.out_features}{glu}")


def _rms_norm(norm: nn.Module, k: int) -> tuple[float, float]:
    """eps, and what is added to the weight, of an RMSNorm: by its result, because classes of models differ in no other way that shows."""
    _check_hooks("the norm", norm)
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if isinstance(weight, Tensor) and weight.shape == (k,) and len(list(norm.parameters())) == 1 and isinstance(eps, float):
        with torch.no_grad():
            x = math.sqrt(eps) * torch.linspace(-3, 3, k, device=weight.device)[None].to(weight.dtype)  # so small that eps counts
            y, x = norm(x).float(), x.float()
            x = x * torch.rsqrt(x.square().mean() + eps)
            tolerance = 4 * torch.finfo(weight.dtype).eps
            for offset in (0.0, 1.0):  # 1: Gemma's
                if torch.allclose(y, x * (weight.float() + offset), rtol=tolerance, atol=1e-6):
                    return eps, offset
    raise Unsupported(f"{type(norm).__name__} is no RMSNorm of {k} channels")


class QuantConv2d(_Quantized):
    """y = act(conv2d(x, W) + bias), with W quantized: what takes the place of a torch.nn.Conv2d.

    weight: of nibble.quantize_conv. stride, padding (of zeros), dilation: as PackedWeight.conv takes them. The result is channels_last
    in memory where x is. The rest is as in QuantLinear.
    """

    def __init__(
        self, weight: nibble.PackedWeight | nibble.QuantTensor, *, stride: int | Sequence[int] = 1, padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1, groups: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(weight, **options)
        self.stride, self.padding, self.dilation = nibble._pair(stride), nibble._padding(padding), nibble._pair(dilation)
        self.groups = groups
        self.out_channels, k, self.kernel_size = self._sizes
        self.in_channels = k * groups // math.prod(self.kernel_size)

    @classmethod
    def from_float(cls, module: nn.Conv2d, scheme: str = "u4b8g128", **options: Any) -> QuantConv2d:
        """Raises Unsupported for a padding_mode other than zeros, and what nibble.quantize_conv does."""
        if module.padding_mode != "zeros":
            raise Unsupported(
                f"padding_mode is {module.padding_mode!r}; nibble pads with zeros: use torch.nn.functional.pad and no padding, or skip it"
            )
        act_scheme, weight_scheme = _parts(scheme)
        q = _with_bias(nibble.quantize_conv(module.weight.detach().cpu(), weight_scheme), module)
        options = {"act_scheme": act_scheme, "device": module.weight.device, "dtype": module.weight.dtype, **options}
        left, right, top, bottom = module._reversed_padding_repeated_twice  # whatever "same" comes to
        return cls(
            q, stride=module.stride, padding=(top, bottom, left, right), dilation=module.dilation, groups=module.groups, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 3:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if _eager(x):
            return self._found().conv(
                x, stride=self.stride, padding=self.padding, dilation=self.dilation, groups=self.groups, activation=self.activation
            )
        return torch.ops.nibble.conv2d(
            x, self.packed, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation, self.groups, None,
            self.activation, None,
        )  # fmt: skip

    def extra_repr(self) -> str:
        shape = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"
        return self._described(f"{shape}, dilation={self.dilation}, groups={self.groups}")


def _usual_type(weight: nibble.PackedWeight | nibble.QuantTensor) -> torch.dtype:
    """That of the scales, or of a dense weight."""
    if isinstance(weight, nibble.QuantTensor):
        return _to_torch((weight.codes if weight.scales is None else weight.scales)[:0]).dtype
    return getattr(torch, _arrays.NAMES[weight.scheme if weight.scale == "none" else weight.scale])


def _parts(scheme: str) -> tuple[str, str]:
    """Of activations, or "", and of weights."""
    return _core.act_scheme(scheme) if "_" in scheme else "", scheme.rpartition("_")[2]


def _pack(q: nibble.QuantTensor, device: torch.device, **spec: Any) -> nibble.PackedWeight:
    if device.type == "cuda":
        with torch.cuda.device(device):
            return nibble.pack(q, backend="cuda", **spec)
    return nibble.pack(q, **spec)


def _to_torch(array: np.ndarray) -> Tensor:
    """A copy; NumPy's bf16 and FP8 as torch's."""
    name = {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name)
    bits = {2: np.int16, 1: np.uint8}.get(array.dtype.itemsize, array.dtype) if name.startswith(("bfloat", "float8")) else array.dtype
    return torch.from_numpy(array.view(bits).copy()).view(getattr(torch, name))


def _float_weight(module: nn.Module) -> Tensor | None:
    """W [N,K] of a dense layer; None for anything else."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.dtype not in _COMPUTED:
        return None
    if isinstance(module, nn.Linear) and type(module).__name__ != "NonDynamicallyQuantizableLinear":  # attention reads its weight
        return weight
    return weight.T if type(module).__name__ == "Conv1D" else None  # GPT-2's


def _quantize(module: nn.Module, weight: Tensor, scheme: str) -> nibble.QuantTensor:
    return _with_bias(nibble.quantize(weight.detach().cpu().contiguous(), scheme), module)


def _with_bias(q: nibble.QuantTensor, module: nn.Module) -> nibble.QuantTensor:
    bias = getattr(module, "bias", None)
    return q if bias is None else _replace(q, bias=bias.detach().cpu())


# Last: they use what is above.
from nibble import _torch_experts, _torch_parallel
from nibble._torch_convert import _SKIP, Converted, _Skip, _why_not, convert, read_module
from nibble._torch_experts import QuantExperts
from nibble._torch_fuse import Fused, _Block, _check_hooks, _Columns, _empty_block, fuse, unfuse
from nibble._torch_parallel import (
    ColumnParallelLinear, ParallelExperts, RowParallelLinear, _replace, shard_experts, shard_inputs, shard_outputs,
)  # fmt: skip
from nibble import _torch_shared  # which needs those
from nibble._torch_shared import _Among, split_mlp
