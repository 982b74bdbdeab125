"""The shims against what their operators are defined to compute, in plain torch. Skipped without PyTorch."""

from __future__ import annotations

import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
from nibble.compat import _shared, sglang, vllm  # noqa: E402

M, N, K, G = 5, 32, 256, 128


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    _shared.clear()


def words(codes, order=range(8)):
    """Eight nibbles a word along the last dimension; order[i] is the nibble of code i."""
    grouped = codes.to(torch.int64).unflatten(-1, (-1, 8))
    packed = sum(grouped[..., i] << (4 * nibble_) for i, nibble_ in enumerate(order))
    return (packed - ((packed >> 31) << 32)).to(torch.int32)


def awq():
    q, z, s = torch.randint(16, (K, N)), torch.randint(16, (K // G, N)), (torch.rand(K // G, N) * 0.1).half()
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    w = (q - z.repeat_interleave(G, 0)).float() * s.float().repeat_interleave(G, 0)
    return words(q, order), s, words(z, order), w


def test_awq():
    qweight, scales, qzeros, w = awq()
    for got in (vllm.awq_dequantize(qweight, scales, qzeros, 0, 0, 0), sglang.awq_dequantize(qweight, scales, qzeros)):
        assert got.dtype == torch.float16 and torch.equal(got, w.half())
    x = torch.randn(M, K).half()
    y = vllm.awq_gemm(x, qweight, scales, qzeros, 8)
    assert y.dtype == torch.float16 and distance(y, x.float() @ w) < 1e-3


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("exllama", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(v2, exllama, act_order):
    q, z, s = torch.randint(16, (K, N)), torch.randint(1, 16, (K // G, N)), (torch.rand(K // G, N) * 0.1).half()
    g_idx = (torch.arange(K) // G)[torch.randperm(K)].int() if act_order else (torch.arange(K) // G).int()
    w = (q - z[g_idx.long()]).float() * s.float()[g_idx.long()]
    qweight, qzeros = words(q.T).T.contiguous(), words(z if v2 else z - 1)
    index = g_idx if not exllama else torch.argsort(g_idx).int() if act_order else torch.empty(0, dtype=torch.int32)
    x = torch.randn(M, K)
    vllm.gptq_shuffle(qweight, index, 4)
    assert distance(vllm.gptq_gemm(x, qweight, qzeros, s, index, exllama, v2, 4), x @ w) < 1e-5
    if not v2:
        assert distance(sglang.gptq_gemm(x, qweight, qzeros, s, index, exllama, 4), x @ w) < 1e-5
    if not act_order:
        assert distance(vllm.gptq_gemm(x, qweight, qzeros, s, exllama, v2, 4), x @ w) < 1e-5


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("make", [int8, fp8])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_scaled_mm(make, per_token, per_channel):
    a, b = make(M, K), make(N, K).t()
    scale_a = torch.rand((M, 1) if per_token else (1,)) * 0.1
    scale_b = torch.rand((N, 1) if per_channel else (1,)) * 0.1
    bias = torch.randn(N).bfloat16()
    exact = scale_a * (a.float() @ b.float()) * scale_b.flatten() + bias.float()
    y = vllm.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16, bias)
    assert y.dtype == torch.bfloat16 and distance(y.float(), exact) < 6e-3
    theirs = sglang.int8_scaled_mm if make is int8 else sglang.fp8_scaled_mm
    assert torch.equal(theirs(a, b, scale_a, scale_b, torch.bfloat16, bias), y)
    assert vllm.cutlass_scaled_mm(a.view(1, M, K), b, scale_a, scale_b, torch.float16).shape == (1, M, N)


def test_blockwise():
    a, b = fp8(M, K), fp8(2 * G, K).t()
    scale_a, scale_b = torch.rand(M, K // G), torch.rand(K // G, 2)
    exact = (a.float() * scale_a.repeat_interleave(G, 1)) @ (b.float() * scale_b.repeat_interleave(G, 0).repeat_interleave(G, 1))
    y = vllm.cutlass_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)
    assert distance(y.float(), exact) < 6e-3
    assert torch.equal(sglang.fp8_blockwise_scaled_mm(a, b, scale_a, scale_b, torch.bfloat16), y)


@pytest.mark.parametrize("per_token_scale", [False, True])
@pytest.mark.parametrize("per_token_zero", [False, True])
def test_scaled_mm_azp(per_token_scale, per_token_zero):
    a, b = int8(M, K), int8(N, K).t()
    scale_a, scale_b = torch.rand((M, 1) if per_token_scale else (1,)), torch.rand(N)
    azp = torch.randint(-20, 20, (M, 1) if per_token_zero else (1,), dtype=torch.int32)
    sums = b.sum(0, dtype=torch.int32)
    exact = scale_a * ((a.float() - azp) @ b.float()) * scale_b
    if per_token_zero:
        y = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, sums, azp)
    else:
        y = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, azp * sums)
    assert distance(y.float(), exact) < 6e-3


def test_scaled_mm_azp_of_columns_that_sum_to_nothing():
    a, b = int8(M, K), torch.cat((int8(N, K // 2), -int8(N, K // 2).clamp(-127, 127)), 1)
    b[:, K // 2 :] = -b[:, : K // 2].clamp(-127, 127)
    b[:, : K // 2] = -b[:, K // 2 :]
    b = b.t()
    scale_a, scale_b, sums = torch.rand(M, 1), torch.rand(N), b.sum(0, dtype=torch.int32)
    assert not sums.any()
    y = vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, 5 * sums)
    assert distance(y.float(), scale_a * (a.float() @ b.float()) * scale_b) < 6e-3


def test_scaled_mm_azp_that_is_no_zero_point():
    a, b = int8(M, K), int8(N, K).t()
    b[:, 3] = 0
    scale_a, scale_b, sums = torch.rand(1), torch.rand(N), b.sum(0, dtype=torch.int32)
    largest = int(sums.abs().argmax())

    def changed(adj, at, by):
        adj = adj.clone()
        adj[at] += by
        return adj

    def refused(adj, match, azp=None):
        with pytest.raises(nibble.InvalidArgument, match=match):
            vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, adj, azp)

    other = 7 if largest != 7 else 8
    refused(changed(-9 * sums, other, 1), rf"azp_adj\[{other}\] = {-9 * int(sums[other]) + 1}, and column {other} of b sums to {int(sums[other])}: not -9 times that")
    refused(changed(-9 * sums, largest, 1), "not -(9|10) times that")
    refused(changed(-9 * sums, 3, 2), r"azp_adj\[3\] = 2, and column 3 of b sums to 0")
    azp = torch.randint(-20, 20, (M, 1), dtype=torch.int32)
    refused(-9 * sums, "not 1 times that, as with azp; pass azp and b.sum", azp)
    refused(changed(sums, other, 1), rf"azp_adj\[{other}\]", azp)
    for adj in (sums[:-1], sums.repeat(2)):
        refused(adj, rf"azp_adj has shape \[{adj.numel()}\]; b \[{K}, {N}\] takes {N} elements")
    vllm.cutlass_scaled_mm_azp(a, b, scale_a, scale_b, torch.bfloat16, sums, azp)
    sums[other] += 1  # written since
    refused(sums, "column", azp)


def test_int8_quant():
    x = torch.randn(M, K) + 0.2
    codes, scale, azp = vllm.scaled_int8_quant(x)
    exact = x.abs().amax(-1, keepdim=True) / 127
    assert azp is None and torch.allclose(scale, exact) and scale.shape == (M, 1)
    assert (codes - (x / exact).round()).abs().max() <= 1
    codes, scale, azp = vllm.scaled_int8_quant(x, symmetric=False)
    assert azp.dtype == torch.int32 and azp.shape == (M, 1)
    assert ((codes.float() - azp) * scale - x).abs().max() <= scale.max() * 0.51
    codes, scale, azp = vllm.scaled_int8_quant(x, torch.tensor([0.03]), torch.tensor([7], dtype=torch.int32), symmetric=False)
    assert (codes - ((x / 0.03).round() + 7).clamp(-128, 127)).abs().max() <= 1
    with pytest.raises(ValueError, match="azp"):
        vllm.scaled_int8_quant(x, torch.tensor([0.03]), symmetric=False)


def test_int8_group_quant():
    x = torch.randn(M, K)
    codes, scale = vllm.per_token_group_quant_int8(x, 64)
    q, s = torch.empty(M, K, dtype=torch.int8), torch.empty(M, K // 64)
    sglang.sgl_per_token_group_quant_int8(x, q, s, 64, 1e-10, -128, 127)
    assert torch.equal(q, codes) and torch.equal(s, scale)
    assert ((codes.float().unflatten(1, (4, 64)) * scale[..., None]).flatten(1) - x).abs().max() <= scale.max() * 0.51


def test_fp8_quant():
    x = torch.randn(M, K)
    for options, shape in [({}, (1,)), ({"use_per_token_if_dynamic": True}, (M, 1)), ({"scale": torch.tensor([0.02])}, (1,))]:
        codes, scale = vllm.scaled_fp8_quant(x, **options)
        assert codes.dtype == torch.float8_e4m3fn and scale.shape == shape
        assert distance(codes.float() * scale, x) < 0.05
    codes, scale = vllm.scaled_fp8_quant(x, num_token_padding=8)
    assert codes.shape == (8, K)
    capped, scale = vllm.scaled_fp8_quant(x, scale_ub=torch.tensor([1.0]), use_per_token_if_dynamic=True)
    assert scale.max() <= 1 / 448 + 1e-6 and capped.float().abs().max() == 448
    q, s = torch.empty(M, K, dtype=torch.float8_e4m3fn), torch.empty(M)
    sglang.sgl_per_token_quant_fp8(x, q, s)
    assert torch.equal(s, vllm.scaled_fp8_quant(x, use_per_token_if_dynamic=True)[1][:, 0])
    s = torch.empty(1)
    sglang.sgl_per_tensor_quant_fp8(x, q, s, False)
    assert torch.allclose(s, x.abs().max() / 448) and distance(q.float() * s, x) < 0.05
    with pytest.raises(NotImplementedError):
        vllm.scaled_fp8_quant(x, torch.ones(M, 2), group_shape=(1, 128))


@pytest.mark.parametrize("column_major", [False, True])
def test_fp8_group_quant(column_major):
    x = torch.randn(M, K)
    codes, scale = vllm.per_token_group_quant_fp8(x, G, column_major_scales=column_major, tma_aligned_scales=column_major)
    assert scale.shape == (M, 2) and (scale.stride(0) == 1) == column_major
    assert torch.allclose(scale, x.unflatten(1, (2, G)).abs().amax(-1) / 448)
    assert distance(codes.float() * scale.repeat_interleave(G, 1), x) < 0.05
    q, s = torch.empty(M, K, dtype=torch.float8_e4m3fn), torch.empty(M, 2)
    sglang.sgl_per_token_group_quant_fp8(x, q, s, G, 1e-10, -448.0, 448.0, False)
    assert torch.equal(q.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(s, scale)


def test_weights_are_packed_once_and_forgotten_with_their_tensors():
    a, b, one = int8(M, K), int8(N, K).clamp(min=-127), torch.ones(1)
    first = _shared.codes(b.t(), one)
    assert _shared.codes(b.t(), one) is first  # another view of the same memory
    before = vllm.cutlass_scaled_mm(a, b.t(), one, one, torch.float16)
    b.neg_()  # written since: packed anew
    assert _shared.codes(b.t(), one) is not first
    assert torch.equal(vllm.cutlass_scaled_mm(a, b.t(), one, one, torch.float16), -before)
    del b
    _shared.codes(int8(N, K).t(), one)
    assert len(_shared._remembered) == 1
