"""What the shims of engines' expert layers share: packed experts, remembered by the checkpoint tensors they came from."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import torch
from torch import Tensor

import nibble
from nibble.compat import _shared
from nibble.errors import InvalidArgument, Unsupported
from nibble.experts import PackedExperts, moe, pack_experts

_DENSE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _place(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def packed(
    w: Tensor, scale: Tensor | None, zeros: Tensor | None, bias: Tensor | None, block_shape: Sequence[int] | None, *, bits: int = 8, **spec: Any
) -> PackedExperts:  # fmt: skip
    """w: [E,N,K] floats, FP8 or int8, or bits 4 [E,N,K/2], the first of two codes in the low half. scale: [E] of an expert, [E,N] of channels,
    with block_shape (n, k) [E, ⌈N/n⌉, ⌈K/k⌉], of which n = 0 is a group of a channel. zeros: codes [E, N/2, K/k], as w along N; else 8."""

    def make() -> PackedExperts:
        with _place(w.device):
            backend = {"backend": "cuda"} if w.is_cuda else {}
            return pack_experts(_each(w, scale, zeros, bias, block_shape, bits), **spec, **backend)

    tensors = tuple(t for t in (w, scale, zeros, bias) if t is not None)
    which = tuple(t is not None for t in (scale, zeros, bias))
    return _shared.remember(tensors, (which, tuple(block_shape or ()), bits, *sorted(spec.items())), make)


def _each(
    w: Tensor, scale: Tensor | None, zeros: Tensor | None, bias: Tensor | None, block_shape: Sequence[int] | None, bits: int
) -> Iterator[nibble.QuantTensor]:  # fmt: skip
    experts, n, k = w.shape[0], w.shape[1], w.shape[2] * (2 if bits == 4 else 1)
    if scale is None:
        if w.dtype not in _DENSE:
            raise InvalidArgument(f"weights of type {w.dtype} come with scales")
        scheme = _DENSE[w.dtype]
    else:
        scheme, scale = _with_scales(w, scale, zeros is not None, n, k, block_shape, bits)
    for e in range(experts):
        fields: dict[str, Any] = {"codes": w[e].detach().cpu().contiguous()}
        if fields["codes"].dtype == torch.float8_e4m3fn:
            fields["codes"] = fields["codes"].view(torch.uint8)
        if scale is not None:
            fields["scales"] = scale[e].detach().cpu().float().contiguous()
        if zeros is not None:
            z = zeros[e].detach().cpu()  # two channels a byte
            fields["zeros"] = torch.stack([z & 15, z >> 4], 1).flatten(0, 1).contiguous()
        if bias is not None:
            fields["bias"] = bias[e].detach().cpu().float().contiguous()
        if bits == 4:
            fields["nibble_order"] = "low_first"
        yield nibble.QuantTensor(scheme, **fields)


def _with_scales(
    w: Tensor, scale: Tensor, has_zeros: bool, n: int, k: int, block_shape: Sequence[int] | None, bits: int
) -> tuple[str, Tensor]:
    """The scheme, and scales [E, rows, groups]."""
    experts = w.shape[0]
    kinds = {torch.float8_e4m3fn: "e4m3", torch.int8: "s8", torch.uint8: "u4z" if has_zeros else "u4b8" if bits == 4 else "u8b128"}
    if has_zeros and bits != 4:
        raise Unsupported("zero points of 8-bit codes of experts; nibble's shim takes those of 4-bit codes")
    if w.dtype not in kinds or (bits == 4 and w.dtype != torch.uint8):
        raise InvalidArgument(f"weights of type {w.dtype} with scales; those are float8_e4m3fn, int8, or uint8 for codes of {bits} bits")
    kind = kinds[w.dtype]
    if block_shape:
        rows, group = block_shape
        wanted = (experts, -(-n // rows) if rows else n, -(-k // group))
        name = f"{kind}b{rows}x{group}" if rows > 1 else f"{kind}g{group}"
    elif scale.numel() == experts:
        wanted, name = (experts, 1, 1), kind + "t"
        scale = scale.reshape(wanted)
    else:
        wanted, name = (experts, n, 1), kind + "c"
        scale = scale.reshape(wanted) if scale.numel() == experts * n else scale
    if tuple(scale.shape) != wanted:
        raise InvalidArgument(f"scales of shape {list(scale.shape)}; weights [{experts},{n},{k}] of {name} take {list(wanted)}")
    return name, scale


# The activation of the first half of w1's result, by vLLM's names.
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_erf", "gelu_tanh": "gelu_tanh"}


def fused_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, *, inplace: bool, activation: Any,
    apply_router_weight_on_input: bool, expert_map: Tensor | None, kind: str | None, w1_scale: Tensor | None, w2_scale: Tensor | None,
    w1_zp: Tensor | None, w2_zp: Tensor | None, block_shape: Sequence[int] | None, w1_bias: Tensor | None,
    w2_bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """kind: None of floats, fp8_w8a8, int8_w8a8, int8_w8a16 or int4_w4a16."""
    name = getattr(activation, "value", activation)
    if name not in _ACTIVATIONS:
        raise Unsupported(f"activation {name!r} of a fused layer; nibble takes {', '.join(_ACTIVATIONS)}, each of w1's first half times its second")
    if (kind is None) != (w1_scale is None):
        raise InvalidArgument(f"{'floats' if kind is None else kind} {'with' if w1_scale is not None else 'without'} w1_scale")
    spec: dict[str, Any] = {"act_scheme": ""}
    if kind in ("fp8_w8a8", "int8_w8a8"):
        act = "e4m3" if kind == "fp8_w8a8" else "s8"
        spec["act_scheme"] = f"{act}g{block_shape[1]}" if block_shape else f"{act}r"
    bits = 4 if kind == "int4_w4a16" else 8
    gate_up = packed(w1, w1_scale, w1_zp, w1_bias, block_shape, bits=bits, glu=True, **spec)
    down = packed(w2, w2_scale, w2_zp, w2_bias, block_shape, bits=bits, **spec)
    ids = topk_ids.to(torch.int32)
    if expert_map is not None:
        held = expert_map.to(torch.int32)
        ids = torch.where((ids >= 0) & (ids < held.numel()), held[ids.clamp(0, held.numel() - 1).long()], -1)
    x, weights = hidden_states.contiguous(), topk_weights.float()
    if apply_router_weight_on_input:
        if ids.shape[-1] != 1:
            raise Unsupported(f"apply_router_weight_on_input with {ids.shape[-1]} experts of a token; it is for one (Llama 4)")
        x, weights = (x.float() * weights).to(x.dtype), torch.ones_like(weights)
    y = moe(x, ids, weights, gate_up, down, activation=_ACTIVATIONS[name])
    return hidden_states.copy_(y) if inplace else y
