"""DeepGEMM's grouped products of FP8 over nibble: names, signatures and tensors are DeepGEMM's.

    from nibble.compat import deep_gemm

On the CPU or the GPU; on a GPU nothing waits for the host, so that calls can be captured. As in nibble.compat.vllm, a weight is packed when
it is first seen and remembered for as long as its tensors live: that call takes long, and is not for a graph. Scales have any strides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.compat import _experts
from nibble.errors import InvalidArgument, Unsupported
from nibble.experts import PackedExperts, grouped

_ALIGNMENT = 128


def get_mk_alignment_for_contiguous_layout() -> int:
    """128, as DeepGEMM has it unless told otherwise: where groups begin in prefix sums. nibble aligns nothing."""
    return _ALIGNMENT


def get_mn_major_tma_aligned_tensor(x: Tensor) -> Tensor:
    """x: scales are read as they lie."""
    return x


def m_grouped_fp8_gemm_nt_contiguous(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor, recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None, recipe_b: tuple[int, int] | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:  # fmt: skip
    """a: e4m3 [M,K] with scales f32 [M, ⌈K/128⌉], b: e4m3 [G,N,K] with scales f32 [G, ⌈N/128⌉, ⌈K/128⌉] → d bf16 [M,N], in place.

    grouped_layout: int32 [M], the group of each row, which rises; -1 is a row of padding, whose row of d is anything that the group before
    makes of it. Indices that fall, or are no group, are InvalidArgument on the CPU, and a failed assertion of PyTorch on the GPU. With
    use_psum_layout: int32 [G], where the rows of each group end, and the next begins at a multiple of 128; padding of zeros gives zeros.
    recipe: (1, 128, 128), or (1, 1, 128) for scales of b [G, N, ⌈K/128⌉]; or those of a and b as recipe_a and recipe_b. The other arguments
    change nothing. Packed scales (ue8m0 in int32) are those of GPUs that nibble has no kernels for, and refused, as are codes of 4 bits.
    """
    codes, scales, experts, act_scheme = _operands(a, b, d, 2, recipe, recipe_a, recipe_b)
    m, groups = d.shape[0], len(experts)
    wanted = groups if use_psum_layout else m
    if grouped_layout.dtype != torch.int32 or grouped_layout.shape != (wanted,):
        raise InvalidArgument(f"grouped_layout is {_said(grouped_layout)}; it takes int32 [{wanted}]")
    if m == 0:
        return
    offsets = _of_sums(grouped_layout, m) if use_psum_layout else _of_indices(grouped_layout, groups)
    grouped(codes, experts, offsets=offsets, a_scale=scales, act_scheme=act_scheme, out=d)


def m_grouped_fp8_gemm_nn_contiguous(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, grouped_layout: Tensor, recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None, recipe_b: tuple[int, int] | None = None, compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False, use_psum_layout: bool = False, ensure_zero_padding: bool = True,
) -> None:  # fmt: skip
    """The same for b [G,K,N] with scales [G, ⌈K/128⌉, ⌈N/128⌉]."""
    transposed = b[0].transpose(1, 2), b[1].transpose(1, 2)
    m_grouped_fp8_gemm_nt_contiguous(
        a, transposed, d, grouped_layout, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, use_psum_layout, ensure_zero_padding
    )


def m_grouped_fp8_gemm_nt_masked(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, masked_m: Tensor, expected_m: int,
    recipe: tuple[int, int, int] | None = None, recipe_a: tuple[int, int] | None = None, recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk", disable_ue8m0_cast: bool = False,
) -> None:  # fmt: skip
    """a: e4m3 [G,M,K] with scales f32 [G, M, ⌈K/128⌉], b as above → d bf16 [G,M,N], in place: of group g the first masked_m[g] rows are read
    and written, masked_m int32 [G]. expected_m changes nothing."""
    codes, scales, experts, act_scheme = _operands(a, b, d, 3, recipe, recipe_a, recipe_b)
    if masked_m.dtype != torch.int32 or masked_m.shape != (len(experts),):
        raise InvalidArgument(f"masked_m is {_said(masked_m)}; it takes int32 [{len(experts)}]")
    # Where each group has its scales by columns, one matrix of all is a copy.
    grouped(codes, experts, counts=masked_m, a_scale=scales.reshape(-1, scales.shape[-1]), act_scheme=act_scheme, out=d)


def _said(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _granularity(
    recipe: tuple[int, int, int] | None, recipe_a: tuple[int, int] | None, recipe_b: tuple[int, int] | None
) -> tuple[int, tuple[int, int]]:
    """The channels of a token with a scale, and the rows and columns of a weight."""
    if (recipe_a is None) != (recipe_b is None) or (recipe is not None and recipe_a is not None):
        raise InvalidArgument(f"recipe={recipe}, recipe_a={recipe_a}, recipe_b={recipe_b}; give recipe, or the other two, or none")
    if recipe_a is None or recipe_b is None:
        m, n, k = recipe or (1, 128, 128)
        recipe_a, recipe_b = (m, k), (n, k)
    if recipe_a[0] != 1:
        raise Unsupported(f"a scale for {recipe_a[0]} tokens; nibble has one for each token and {recipe_a[1]} channels")
    return recipe_a[1], recipe_b


def _operands(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], d: Tensor, rank: int, recipe: tuple[int, int, int] | None,
    recipe_a: tuple[int, int] | None, recipe_b: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, PackedExperts, str]:  # fmt: skip
    """The codes and scales of a, b packed, and how a was quantized."""
    (codes, scales), (w, w_scales) = a, b
    group, block = _granularity(recipe, recipe_a, recipe_b)
    for name, each in (("a", scales), ("b", w_scales)):
        if each.dtype == torch.int32:
            raise Unsupported(f"the scales of {name} are int32: four powers of two each (ue8m0), of GPUs from compute capability 10.0 on; pass f32")
        if each.dtype != torch.float32:
            raise InvalidArgument(f"the scales of {name} are {_said(each)}; they are float32")
    for name, each in (("a", codes), ("b", w)):
        if each.dtype != torch.float8_e4m3fn:
            raise Unsupported(f"{name} is {_said(each)}; nibble's grouped products of codes are of float8_e4m3fn")
    if w.ndim != 3 or codes.ndim != rank or codes.shape[-1] != w.shape[2] or (rank == 3 and codes.shape[0] != w.shape[0]):
        raise InvalidArgument(f"a is {_said(codes)} and b {_said(w)}; they are {'[M,K]' if rank == 2 else '[G,M,K]'} and [G,N,K]")
    if d.dtype != torch.bfloat16 or d.shape != (*codes.shape[:-1], w.shape[1]):
        raise InvalidArgument(f"d is {_said(d)}; it takes bfloat16 {[*codes.shape[:-1], w.shape[1]]}")
    if scales.shape != (*codes.shape[:-1], -(-w.shape[2] // group)):
        raise InvalidArgument(f"the scales of a are {_said(scales)}; they take [{'M' if rank == 2 else 'G,M'}, {-(-w.shape[2] // group)}]")
    act_scheme = f"e4m3g{group}"
    return codes, scales, _experts.packed(w, w_scales, None, None, block, act_scheme=act_scheme), act_scheme


def _of_indices(indices: Tensor, groups: int) -> Tensor:
    """Offsets [G+1] of rows whose groups rise; a row of padding belongs to the group before it."""
    group_of = indices.cummax(0).values.clamp(min=0)
    rises = ((indices < 0) | (indices == group_of)).all() & (group_of[-1] < groups)
    if rises.is_cuda:
        torch._assert_async(rises, f"grouped_layout rises from 0 to {groups - 1}, -1 in rows of padding")
    elif not rises:
        fits = (indices < groups) & ((indices < 0) | (indices == group_of))
        row = int((~fits).nonzero()[0])
        raise InvalidArgument(f"grouped_layout[{row}]={int(indices[row])}: groups rise from 0 to {groups - 1}, and the one before is {int(group_of[row])}")
    return torch.searchsorted(group_of, torch.arange(groups + 1, dtype=torch.int32, device=indices.device), out_int32=True)


def _of_sums(ends: Tensor, m: int) -> Tensor:
    """Offsets [G+1] from where groups end, each of which begins at a multiple of the alignment."""
    begins = ((ends[:-1] + (_ALIGNMENT - 1)) // _ALIGNMENT * _ALIGNMENT).clamp(max=m)
    return torch.cat([ends.new_zeros(1), begins, ends.new_full((1,), m)])
