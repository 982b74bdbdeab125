"""vLLM's quantization operators (vllm._custom_ops, fp8_utils, int8_utils) over nibble: names, signatures and tensors are vLLM's.

    from nibble.compat import vllm as ops          # in place of: from vllm import _custom_ops as ops

Tensors are taken as checkpoints have them, on the CPU or the GPU. A weight is packed when it is first seen and remembered for as long
as its tensors live. gptq_shuffle does nothing here: swap it together with gptq_gemm, or neither.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

import nibble
from nibble.compat import _experts, _shared
from nibble.errors import InvalidArgument, Unsupported


def awq_dequantize(qweight: Tensor, scales: Tensor, zeros: Tensor, split_k_iters: int, thx: int, thy: int) -> Tensor:
    """qweight s32 [K, N/8], scales [G,N], zeros s32 [G, N/8] → [K,N] in the type of the scales. The last three change nothing."""
    return _shared.awq_dequantize(qweight, scales, zeros)


def awq_gemm(input: Tensor, qweight: Tensor, scales: Tensor, qzeros: Tensor, split_k_iters: int) -> Tensor:
    """input [M,K] → [M,N] in its type."""
    return _shared.awq(qweight, scales, qzeros).linear(input)


def gptq_gemm(
    a: Tensor, b_q_weight: Tensor, b_gptq_qzeros: Tensor, b_gptq_scales: Tensor, b_g_idx: Tensor | bool, use_exllama: bool,
    use_v2_format: bool | int, bit: int | None = None,
) -> Tensor:  # fmt: skip
    """a [M,K] → [M,N]. b_g_idx is g_idx, or with use_exllama its argsort; empty without act-order. Newer versions of vLLM, which have no
    b_g_idx, pass seven arguments; those are understood too."""
    if isinstance(b_g_idx, Tensor):
        index, exllama, v2, bits = b_g_idx, use_exllama, bool(use_v2_format), bit or 4
    else:
        index, exllama, v2, bits = None, b_g_idx, use_exllama, int(use_v2_format)
    return _shared.gptq(b_q_weight, b_gptq_qzeros, b_gptq_scales, index, exllama, v2, bits).linear(a)


def gptq_shuffle(q_weight: Tensor, *args: object) -> None:
    """Nothing: gptq_gemm reads weights as checkpoints have them."""


def cutlass_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a [..., K] and b [K,N] (column-major), int8 or FP8; scale_a of 1, M or [M, K/128], scale_b of 1, N or [K/128, N/128] f32."""
    return _shared.scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)


def cutlass_scaled_mm_azp(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, azp_adj: Tensor, azp: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same for int8 activations with zero points: azp s32 [M] with azp_adj s32 [N] the column sums of b, or azp None and azp_adj
    already times the one zero point. nibble sums the columns itself: azp_adj tells that zero point, or has to be those sums. It is compared
    with b when the two are first seen, which waits for the GPU."""
    zero = _shared.remember((b, azp_adj), ("azp_adj", azp is None), lambda: _zero_point(b, azp_adj, azp is not None))
    return _shared.scaled_mm(a, b, scale_a, scale_b, out_dtype, bias, zero if azp is None else azp)


def _zero_point(b: Tensor, azp_adj: Tensor, one: bool) -> Tensor:
    """z s32 [1] of azp_adj = z · the column sums of b; 0 where all of them are 0, for it changes nothing then."""
    sums, adj = b.sum(0, dtype=torch.int64).cpu(), azp_adj.reshape(-1).cpu().long()
    if sums.shape != adj.shape:
        raise InvalidArgument(f"azp_adj has shape {list(azp_adj.shape)}; b {list(b.shape)} takes {sums.numel()} elements")
    largest = int(sums.abs().argmax())
    zero = 1 if one else int(adj[largest]) // (int(sums[largest]) or 1)
    wrong = (adj != zero * sums).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise InvalidArgument(
            f"azp_adj[{at}] = {int(adj[at])}, and column {at} of b sums to {int(sums[at])}: not {zero} times that"
            + (", as with azp" if one else f", as azp_adj[{largest}] = {int(adj[largest])} is of {int(sums[largest])}")
            + "; pass azp and b.sum(0), or no azp and the one zero point times b.sum(0)"
        )
    return torch.tensor([zero], dtype=torch.int32, device=b.device)


def scaled_int8_quant(
    input: Tensor, scale: Tensor | None = None, azp: Tensor | None = None, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """input [..., K] → int8, with a scale f32 [M,1] per token, and a zero point s32 [M,1] unless symmetric; or with those given."""
    if scale is not None:
        if symmetric != (azp is None):
            raise InvalidArgument(f"symmetric={symmetric} {'with' if azp is not None else 'without'} azp")
        scheme, zero = ("s8t", 0) if azp is None else ("s8zt", int(_shared.number(azp)))
        return nibble.quantize_activations(input, scheme, scale=_shared.number(scale), zero=zero)[0], scale, azp
    flat = input.reshape(-1, input.shape[-1])
    codes, scales, zeros = nibble.quantize_activations(flat, "s8r" if symmetric else "s8zr")
    assert scales is not None
    return codes.view(input.shape), scales.view(-1, 1), None if zeros is None else zeros.view(-1, 1)


def scaled_fp8_quant(
    input: Tensor, scale: Tensor | None = None, num_token_padding: int | None = None, scale_ub: Tensor | None = None,
    use_per_token_if_dynamic: bool = False, output: Tensor | None = None, group_shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """input [M,K] → FP8 (e4m3), with a scale f32 [M,1] per token or [1] for all, or with the one given. num_token_padding: rows of the
    result, those past M are not written."""
    if group_shape not in (None, (-1, -1)):
        raise Unsupported(f"a known scale for each group {group_shape}; nibble has one for all, or finds those of groups")
    rows = max(num_token_padding or 0, input.shape[0])
    if output is None:
        output = torch.empty((rows, input.shape[1]), dtype=torch.float8_e4m3fn, device=input.device)
    codes = output[: input.shape[0]]
    if scale is None and use_per_token_if_dynamic:
        limit = None if scale_ub is None else _shared.number(scale_ub)
        scales = torch.empty((input.shape[0], 1), dtype=torch.float32, device=input.device)
        nibble.quantize_activations(input, "e4m3r", limit=limit, codes=codes, scales=scales)
        return output, scales
    if scale is None:
        scale = (input.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max).clamp(min=torch.finfo(torch.float32).tiny).view(1)
    nibble.quantize_activations(input, "e4m3t", scale=_shared.number(scale), codes=codes)
    return output, scale


def per_token_group_quant_fp8(
    x: Tensor, group_size: int, eps: float = 1e-10, dtype: torch.dtype | None = None, column_major_scales: bool = False,
    tma_aligned_scales: bool = False, out_q: Tensor | None = None, use_ue8m0: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x [..., K] → FP8 with scales f32 [..., K / group_size]. eps changes nothing: a group of zeros has codes 0 under any scale."""
    if use_ue8m0 or dtype not in (None, torch.float8_e4m3fn):
        raise Unsupported(f"scales that are powers of two, or codes of type {dtype}; nibble has f32 scales and float8_e4m3fn")
    flat = x.reshape(-1, x.shape[-1])
    m, groups = flat.shape[0], -(-x.shape[-1] // group_size)
    if column_major_scales:
        aligned = -(-m // 4) * 4 if tma_aligned_scales else m
        scales = torch.empty((groups, aligned), dtype=torch.float32, device=x.device).T[:m]
    else:
        scales = torch.empty((m, groups), dtype=torch.float32, device=x.device)
    q = torch.empty(flat.shape, dtype=torch.float8_e4m3fn, device=x.device) if out_q is None else out_q.view(flat.shape)
    nibble.quantize_activations(flat, f"e4m3g{group_size}", codes=q, scales=scales)
    return q.view(x.shape), scales if x.ndim == 2 else scales.reshape(*x.shape[:-1], groups)


def per_token_group_quant_int8(
    x: Tensor, group_size: int, eps: float = 1e-10, dtype: torch.dtype = torch.int8
) -> tuple[Tensor, Tensor]:
    """x [..., K] → int8 with scales f32 [..., K / group_size]."""
    if dtype != torch.int8:
        raise Unsupported(f"codes of type {dtype}; nibble has int8")
    codes, scales, _ = nibble.quantize_activations(x, f"s8g{group_size}")
    assert scales is not None
    return codes, scales


def fused_experts(
    hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, inplace: bool = False, activation: Any = "silu",
    apply_router_weight_on_input: bool = False, global_num_experts: int = -1, expert_map: Tensor | None = None, quant_config: Any = None, *,
    use_fp8_w8a8: bool = False, use_int8_w8a8: bool = False, use_int8_w8a16: bool = False, use_int4_w4a16: bool = False,
    per_channel_quant: bool = False, w1_scale: Tensor | None = None, w2_scale: Tensor | None = None, w1_zp: Tensor | None = None,
    w2_zp: Tensor | None = None, a1_scale: Tensor | None = None, a2_scale: Tensor | None = None, block_shape: Sequence[int] | None = None,
    w1_bias: Tensor | None = None, w2_bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """hidden_states [T,K], w1 [E,2I,K], w2 [E,K,I], topk_weights and topk_ids [T,top_k] → [T,K]. quant_config: a FusedMoEQuantConfig; older
    versions of vLLM pass what it holds. Weights: floats; FP8 or int8 with scales [E], [E,N] or of blocks; int8, or with block_shape
    (0, group) uint8 of 8 or 4 bits, for 16-bit activations. expert_map: from ids of all processes to those here, -1: elsewhere.

    FP8 and int8 activations get a scale per token, or with block_shape per group of a token, where vLLM without per_channel_quant has one for
    all tokens: the result is nearer to that of floats. Known scales (a1_scale) are refused. Rows are sorted by expert inside, so that nothing
    takes the place of moe_align_block_size."""
    given = {
        "use_fp8_w8a8": use_fp8_w8a8, "use_int8_w8a8": use_int8_w8a8, "use_int8_w8a16": use_int8_w8a16, "use_int4_w4a16": use_int4_w4a16,
        "w1_scale": w1_scale, "w2_scale": w2_scale, "w1_zp": w1_zp, "w2_zp": w2_zp, "a1_scale": a1_scale, "a2_scale": a2_scale,
        "block_shape": block_shape, "w1_bias": w1_bias, "w2_bias": w2_bias,
    }  # fmt: skip
    if quant_config is not None:
        given = {name: getattr(quant_config, name, None) for name in given}
        other = [name for name in ("use_mxfp4_w4a16", "use_mxfp4_w4a4", "use_nvfp4_w4a4", "ocp_mx_scheme") if getattr(quant_config, name, None)]
        if other:
            raise Unsupported(f"quant_config says {', '.join(other)}; nibble's has {', '.join(_EXPERTS)}")
    kinds = [kind for kind in _EXPERTS if given.pop(f"use_{kind}")]
    if len(kinds) > 1:
        raise InvalidArgument(f"weights are {' and '.join(kinds)}")
    if any([given.pop(name) is not None for name in ("a1_scale", "a2_scale")]):
        raise Unsupported("a1_scale or a2_scale: known scales of activations; nibble finds one for each token")
    return _experts.fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, inplace=inplace, activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input, expert_map=expert_map, kind=kinds[0] if kinds else None, **given,
    )  # fmt: skip


_EXPERTS = ("fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
