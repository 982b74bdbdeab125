"""The operators, torch.ops.nibble.*: what they compute, their gradients, and what torch.compile, autocast and torch.vmap make of them."""

from __future__ import annotations

import functools
import math
import re
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor, nn
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.nn.grad import conv2d_input

import nibble
from nibble import _arrays, _core
from nibble._torch.weights import _checked, _COMPUTED, _pack, _to_torch, _weight
from nibble.errors import InvalidArgument

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
