"""What the shims share: packed weights, remembered by the checkpoint tensors they came from."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import nibble
from nibble import _arrays, _core
from nibble._torch.weights import _pack
from nibble.errors import InvalidArgument

_remembered: dict[Any, tuple[list[StorageWeakRef], list[int], Any]] = {}


def clear() -> None:
    """Forgets every packed weight. Those whose tensors are gone are forgotten anyway, when the next one is packed."""
    _remembered.clear()


def remember(tensors: tuple[Tensor, ...], extra: Any, make: Callable[[], Any]) -> Any:
    """make(), or what it returned for these very tensors: the same memory, not written since. Views of it count as the same."""
    # The references keep the addresses of storages, which identify them, from being used again.
    refs = [StorageWeakRef(t.untyped_storage()) for t in tensors]
    key = (*((r.cdata, t.storage_offset(), tuple(t.shape), t.stride(), t.dtype) for r, t in zip(refs, tensors)), extra)
    versions = [0 if t.is_inference() else t._version for t in tensors]
    found = _remembered.get(key)
    if found is not None and found[1] == versions:
        return found[2]
    for stale in [k for k, (old, _, _) in list(_remembered.items()) if any(r.expired() for r in old)]:
        _remembered.pop(stale, None)
    made = make()
    _remembered[key] = (refs, versions, made)
    return made


def _host(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous()


def awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> nibble.PackedWeight:
    """qweight s32 [K, N/8], scales [G,N], qzeros s32 [G, N/8]."""

    def make() -> nibble.PackedWeight:
        tensors = {"qweight": _host(qweight), "qzeros": _host(qzeros), "scales": _host(scales)}
        return _pack(nibble.read_tensors(tensors, {"quant_method": "awq", "bits": 4, "zero_point": True}), qweight.device)

    return remember((qweight, scales, qzeros), "awq", make)


def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """W as [K,N] in the type of the scales."""
    out = torch.empty((qweight.shape[0], qweight.shape[1] * 8), dtype=scales.dtype, device=qweight.device)
    if not qweight.is_cuda:
        return awq(qweight, scales, qzeros).dequantize(transposed=True, out=out)
    with torch.cuda.device(qweight.device):
        stream = torch.cuda.current_stream().cuda_stream
        w, z, s, d = (_arrays.export(t, stream) for t in (qweight, qzeros, scales, out))
        _core.dequantize_tensors(
            format="awq", bits=4, zeros_minus_one=False, qweight=w, qzeros=z, scales=s, out=d, transposed=True, stream=stream
        )
    return out


def gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, is_order: bool, v2: bool, bits: int
) -> nibble.PackedWeight:
    """qweight s32 [K·bits/32, N] as in the checkpoint. g_idx [K], or (is_order) its argsort; None or empty: no act-order."""
    if g_idx is not None and g_idx.numel() == 0:
        g_idx = None

    def make() -> nibble.PackedWeight:
        tensors = {"qweight": _host(qweight), "qzeros": _host(qzeros), "scales": _host(scales)}
        if g_idx is not None:
            index = _host(g_idx).to(torch.int32)
            if is_order:
                order, k = index.long(), index.numel()
                index = torch.empty(k, dtype=torch.int32)
                index[order] = torch.arange(k, dtype=torch.int32) // -(-k // scales.shape[0])
            tensors["g_idx"] = index
        config = {"quant_method": "gptq", "bits": bits, "sym": False, "desc_act": g_idx is not None}
        config["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
        return _pack(nibble.read_tensors(tensors, config), qweight.device)

    parts = (qweight, qzeros, scales)
    return remember(parts if g_idx is None else (*parts, g_idx), ("gptq", is_order, v2, bits), make)


def quant_tensor(b: Tensor, scale_b: Tensor) -> nibble.QuantTensor:
    """b [K,N], int8 or FP8, best column-major; scale_b f32 of 1, N or [K/bk, N/bn] elements."""
    k, n = b.shape
    kind = "s8" if b.dtype == torch.int8 else "e4m3"
    scales = scale_b.detach().cpu().float()
    if scales.numel() == 1:
        group, scales = "t", scales.reshape(1, 1)
    elif scales.numel() == n and (scales.ndim == 1 or scales.shape[0] in (1, n)):
        group, scales = "c", scales.reshape(n, 1)
    elif scales.ndim == 2 and k % scales.shape[0] == 0 and n % scales.shape[1] == 0:
        group, scales = f"b{n // scales.shape[1]}x{k // scales.shape[0]}", scales.T.contiguous()
    else:
        raise InvalidArgument(f"scale_b has shape {list(scales.shape)}; b [{k},{n}] takes 1, N or [K/bk, N/bn] scales")
    rows = b.detach().T.contiguous().cpu()
    return nibble.QuantTensor(kind + group, rows if kind == "s8" else rows.view(torch.uint8), scales)


def codes(b: Tensor, scale_b: Tensor) -> nibble.PackedWeight:
    """The weight that quant_tensor() describes, packed where b is."""
    return remember((b, scale_b), "codes", lambda: _pack(quant_tensor(b, scale_b), b.device))


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None, azp: Tensor | None = None
) -> Tensor:  # fmt: skip
    """scale_a · scale_b · ((a − azp) @ b) + bias, from a [..., K]."""
    flat = a.reshape(-1, a.shape[-1])
    if azp is not None:
        azp = azp.reshape(-1)
        if azp.numel() != scale_a.numel():  # one for all on one side only
            scale_a, azp = (t.reshape(-1).expand(flat.shape[0]).contiguous() for t in (scale_a, azp))
    y = codes(b, scale_b).linear(flat, a_scale=scale_a, a_zero=azp, bias=bias, out_dtype=out_dtype)
    return y.view(*a.shape[:-1], b.shape[1])


def number(t: Tensor) -> float:
    """The value of a tensor of one element. On a GPU the first look waits for it; the same tensor again does not."""
    return remember((t,), "number", lambda: float(np.float32(t.detach().float().item())))
