"""SGLang's quantization operators (sgl_kernel) over nibble: names, signatures and tensors are SGLang's.

    from nibble.compat import sglang as sgl_kernel

As in nibble.compat.vllm, weights are taken as checkpoints have them and packed once; gptq_shuffle does nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

import nibble
from nibble.compat import _shared
from nibble.errors import Unsupported


def awq_dequantize(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Tensor:
    """qweight s32 [K, N/8], scales [G,N], qzeros s32 [G, N/8] → [K,N] in the type of the scales."""
    return _shared.awq_dequantize(qweight, scales, qzeros)


def gptq_gemm(
    a: Tensor, b_q_weight: Tensor, b_gptq_qzeros: Tensor, b_gptq_scales: Tensor, b_g_idx: Tensor, use_shuffle: bool, bit: int
) -> Tensor:
    """a [M,K] → [M,N], GPTQ v1. b_g_idx is g_idx, or with use_shuffle its argsort; empty without act-order."""
    return _shared.gptq(b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx, use_shuffle, False, bit).linear(a)


def gptq_shuffle(q_weight: Tensor, q_perm: Tensor, bit: int) -> None:
    """Nothing: gptq_gemm reads weights as checkpoints have them."""


def int8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """mat_a s8 [M,K], mat_b s8 [K,N] column-major, scales_a f32 [M,1], scales_b f32 [N,1]."""
    return _shared.scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


def fp8_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The same for FP8 (e4m3)."""
    return _shared.scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype, bias)


def fp8_blockwise_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scales_a: Tensor, scales_b: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """FP8 with scales_a f32 [M, K/128] and scales_b f32 [K/128, N/128]."""
    return _shared.scaled_mm(mat_a, mat_b, scales_a, scales_b, out_dtype)


def sgl_per_token_group_quant_fp8(
    input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, eps: float, fp8_min: float, fp8_max: float, scale_ue8m0: bool
) -> None:
    """input [M,K] → output_q e4m3 [M,K], output_s f32 [M, K / group_size] with any strides. fp8_min, fp8_max are ±448; eps changes nothing."""
    if scale_ue8m0 or (fp8_min, fp8_max) != (-448.0, 448.0):
        raise Unsupported("scales that are powers of two, or a range other than ±448; nibble has f32 scales and float8_e4m3fn")
    nibble.quantize_activations(input, f"e4m3g{group_size}", codes=output_q, scales=output_s)


def sgl_per_token_group_quant_int8(
    input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, eps: float, int8_min: float, int8_max: float
) -> None:
    """input [M,K] → output_q s8 [M,K], output_s f32 [M, K / group_size]. Codes are within ±127 whatever the range says."""
    nibble.quantize_activations(input, f"s8g{group_size}", codes=output_q, scales=output_s)


def sgl_per_token_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor) -> None:
    """input [M,K] → output_q e4m3 [M,K], output_s f32 [M] or [M,1]."""
    nibble.quantize_activations(input, "e4m3r", codes=output_q, scales=output_s)


def sgl_per_tensor_quant_fp8(input: Tensor, output_q: Tensor, output_s: Tensor, is_static: bool) -> None:
    """input [M,K] → output_q e4m3 [M,K] with the scale output_s f32 [1]: given when is_static, else found and written."""
    if not is_static:
        output_s.copy_((input.abs().amax().float() / 448.0).clamp(min=torch.finfo(torch.float32).tiny).view_as(output_s))
    nibble.quantize_activations(input, "e4m3t", scale=_shared.number(output_s), codes=output_q)
