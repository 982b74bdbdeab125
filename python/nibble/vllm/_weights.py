"""The tensors of vLLM's layers as QuantTensors, and which of them nibble takes. Needs no vLLM."""

from __future__ import annotations

import functools
import re
from typing import Sequence

import numpy as np
import torch
from torch import Tensor

import nibble
import nibble.torch as nt
from nibble._torch.shards import _replace
from nibble._torch.weights import _pack
from nibble.compat import _shared
from nibble.errors import InvalidArgument, Unsupported

_NAMES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def a_dtype(dtype: torch.dtype) -> str:
    """Raises Unsupported for activations that come as codes."""
    if dtype not in _NAMES:
        raise Unsupported(f"activations of {dtype}; nibble takes float16, bfloat16 and float32 here")
    return _NAMES[dtype]


def grouped_scheme(bits: int, bias: int, zero_points: bool, group_size: int, k: int, whole_k: int) -> str:
    """What vLLM calls uint4b8 with a group size, -1 for one group: "u4b8g128". k: this rank's input channels, of whole_k.

    Raises Unsupported for types that are no scheme, and for groups that do not divide K.
    """
    middle = 1 << (bits - 1)
    if not 2 <= bits <= 8 or bias != (0 if zero_points else middle):
        kind = "with zero points" if zero_points else "without zero points"
        raise Unsupported(f"weights of {bits} bits less {bias} {kind}; nibble takes 2 to 8 bits less {middle}, or with zero points")
    codes = f"u{bits}z" if zero_points else f"u{bits}b{middle}"
    if group_size in (-1, k):
        return f"{codes}c"
    if group_size <= 0 or k % group_size != 0:
        part = "" if k == whole_k else f", this rank's part of {whole_k}; use another tensor_parallel_size"
        raise Unsupported(f"groups of {group_size} input channels do not divide {k}{part}")
    return f"{codes}g{group_size}"


def grouped(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, *, n: int, k: int, bits: int, group_size: int
) -> nibble.QuantTensor:
    """Of the layout of compressed-tensors: weight s32 [N, K·bits/32], scale [N,G], zero_point s32 [N·bits/32, G], g_idx [K]."""
    strategy = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": bits, "type": "int", "symmetric": zero_point is None, **strategy}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    parts = {"weight_packed": weight, "weight_scale": scale, "weight_zero_point": zero_point, "weight_g_idx": g_idx}
    tensors = {name: _shared._host(part) for name, part in parts.items() if part is not None}
    return nibble.read_tensors({**tensors, "weight_shape": torch.tensor([n, k])}, config)


def codes(
    weight: Tensor, scale: Tensor, *, widths: Sequence[int] | None = None, static: tuple[Tensor, Tensor | None] | None = None,
    limit: Tensor | None = None,
) -> nibble.QuantTensor:  # fmt: skip
    """Of a weight [N,K] of int8 or FP8, with a scale f32 for all, for each output channel, for each of the parts that have `widths` output
    channels, or a matrix of them, one for each block. static: the scale and the zero point of activations. limit: no scale of theirs reaches
    further."""
    if widths is not None and scale.numel() == len(widths) > 1:
        scale = scale.flatten().repeat_interleave(torch.tensor(widths, device=scale.device))
    n, k = weight.shape
    if scale.numel() in (1, n):
        q = _shared.quant_tensor(weight.T, scale.flatten())
    else:
        raise InvalidArgument(f"weight_scale has shape {list(scale.shape)}; a weight [{n},{k}] takes 1 or {n} scales")
    return _replace(q, static_acts=_static(static), act_limit=None if limit is None else float(limit))


def blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> nibble.QuantTensor:
    """Of a weight [N,K] of FP8, with a scale [⌈N/bn⌉, ⌈K/bk⌉] for each block of bn × bk."""
    values = _shared._host(weight).view(torch.uint8)
    return nibble.QuantTensor(f"e4m3b{block[0]}x{block[1]}", values, scale.detach().cpu().float())


def _static(static: tuple[Tensor, Tensor | None] | None) -> tuple[float, int] | None:
    """Joined layers have a scale each, of which vLLM takes the largest; that has no meaning for zero points that differ."""
    if static is None:
        return None
    scales, zeros = (None if t is None else t.detach().flatten().cpu() for t in static)
    assert scales is not None
    if zeros is None:
        return float(scales.float().max()), 0
    if scales.unique().numel() != 1 or zeros.unique().numel() != 1:
        raise Unsupported(f"static scales {scales.tolist()} with zero points {zeros.tolist()}; nibble takes one of each")
    return float(scales[0]), int(zeros[0])


def pack(q: nibble.QuantTensor, device: torch.device, dtype: torch.dtype, act_scheme: str = "") -> Tensor:
    """The tensor that torch.ops.nibble.linear takes, on the device."""
    return nt.to_tensor(_pack(q, device, a_dtype=a_dtype(dtype), act_scheme=act_scheme))


@functools.lru_cache(maxsize=None)
def refusal(scheme: str, k: int, dtype: torch.dtype, act_scheme: str = "", *, act_order: bool = False, backend: str = "cuda") -> str:
    """Why nibble does not take layers of such a weight [N,K], whatever N is; "" where it does."""
    n = 256  # few: the answer is for every N
    group = re.search(r"(?:g(\d+)|b(\d+)x(\d+)|([ct]))$", scheme)
    assert group is not None
    rows = {"c": n, "t": 1}.get(group[4], -(-n // int(group[2])) if group[2] else n)
    groups = -(-k // int(group[1] or group[3] or k))
    kind = np.int8 if scheme.startswith("s8") else np.uint8
    try:
        q = nibble.QuantTensor(
            scheme, np.zeros((n, k), kind), np.ones((rows, groups), np.float32), np.zeros((rows, groups), kind) if "z" in scheme else None,
            g_idx=np.arange(k, dtype=np.int32) % groups if act_order and groups > 1 else None,
            static_acts=(1.0, 0) if act_scheme.endswith("t") else None,
        )  # fmt: skip
        buckets = nibble.explain(q, backend=backend, a_dtype=a_dtype(dtype), act_scheme=act_scheme)
    except nibble.Error as problem:
        return str(problem)
    slow = [f"{bucket.m_low} to {bucket.m_high} tokens" for bucket in buckets if any("__ref_" in step for step in bucket.steps)]
    return f"{scheme}: only the reference kernel, which is slow, takes {', '.join(slow)}" if slow else ""
