"""The modules of quantized layers."""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

import nibble
from nibble import _core
from nibble._torch.shards import _replace, shard_outputs
from nibble._torch.weights import _COMPUTED, _copied, _pack, _placed, to_tensor, TorchWeight, _usual_type, _version, _weight
from nibble.errors import InvalidArgument, Unsupported


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


def _parts(scheme: str) -> tuple[str, str]:
    """Of activations, or "", and of weights."""
    return _core.act_scheme(scheme) if "_" in scheme else "", scheme.rpartition("_")[2]


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


def _check_hooks(name: str, module: nn.Module) -> None:
    """Raises Unsupported where something is to run with a module that will not be called any more."""
    if "forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{name} has hooks, or a forward pass of its own, which would be lost; fuse the model first")
