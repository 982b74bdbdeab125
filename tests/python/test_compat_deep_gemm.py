"""DeepGEMM's grouped products against what they are defined to compute, in plain torch. Skipped without PyTorch."""

from __future__ import annotations

import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
from nibble.compat import _shared, deep_gemm  # noqa: E402

G, N, K = 4, 256, 384
DEVICES = ["cpu", *(["cuda"] if nibble.doctor()["gpu"] is not None else [])]
# Rounding d to bf16: numbers in [1, 2) are off by up to 2^-8, their root of squares by 2^-8 / sqrt(3) = 2.3e-3 of 1, of 1.5 1.5e-3.
BOUND = 2e-3


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    _shared.clear()


def codes(*shape):
    """FP8 as quantization makes it, and scales for each 128 channels."""
    x = torch.randn(*shape)
    blocks = x.unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1) / 448
    return (blocks / scales[..., None]).flatten(-2).to(torch.float8_e4m3fn), scales


def values(q, scales):
    return q.float() * scales.repeat_interleave(128, -1)


def weights(device, rows=128):
    q = torch.randn(G, N, K).to(torch.float8_e4m3fn)
    scales = torch.rand(G, N // rows, K // 128) * 0.1 + 0.01
    w = q.float() * scales.repeat_interleave(rows, 1).repeat_interleave(128, 2)
    return (q.to(device), scales.to(device)), w


def by_columns(scales):
    """[..., M, G] as DeepGEMM's kernels read them: M is dense, aligned to 16 bytes."""
    m = scales.shape[-2]
    wide = torch.empty(*scales.shape[:-2], scales.shape[-1], -(-m // 4) * 4, device=scales.device)
    return wide.transpose(-1, -2)[..., :m, :].copy_(scales)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_contiguous(device, padded, columns):
    """Groups of any size, or aligned ones with rows of padding; one group has no row."""
    counts = [7, 0, 130, 3]
    indices = []
    for g, count in enumerate(counts):
        indices += [g] * count + ([-1] * (-count % 128) if padded else [])
    indices = torch.tensor(indices, dtype=torch.int32)
    m, real = len(indices), indices >= 0
    (qa, sa), (b, w) = codes(m, K), weights(device)
    qa.view(torch.uint8)[~real], sa[~real] = 0, 0
    wanted = torch.stack([w[g] @ row for g, row in zip(indices.clamp(min=0), values(qa, sa))])
    a, d = (qa.to(device), by_columns(sa.to(device)) if columns else sa.to(device)), torch.full((m, N), 7.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices.to(device), disable_ue8m0_cast=True)
    assert distance(d.float().cpu()[real], wanted[real]) < BOUND
    transposed = b[0].transpose(1, 2).contiguous(), b[1].transpose(1, 2).contiguous()
    again = torch.empty_like(d)
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, transposed, again, indices.to(device))
    assert torch.equal(again[real.to(device)], d[real.to(device)])


@pytest.mark.parametrize("device", DEVICES)
def test_prefix_sums(device):
    """The end of each group; the next begins at a multiple of 128, and a padding of zeros gives zeros."""
    ends = torch.tensor([7, 128 + 130, 384, 384 + 5], dtype=torch.int32)  # the third has no row
    begins, m = [0, 128, 384, 384], 512
    (qa, sa), (b, w) = codes(m, K), weights(device)
    real = torch.zeros(m, dtype=torch.bool)
    for begin, end in zip(begins, ends):
        real[begin:end] = True
    qa.view(torch.uint8)[~real] = 0
    d = torch.full((m, N), 7.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((qa.to(device), sa.to(device)), b, d, ends.to(device), use_psum_layout=True)
    a, d = values(qa, sa), d.float().cpu()
    for g, (begin, end) in enumerate(zip(begins, ends)):
        if end > begin:
            assert distance(d[begin:end], a[begin:end] @ w[g].T) < BOUND
    assert torch.all(d[~real] == 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("recipe", [None, (1, 128, 128), (1, 1, 128)])
def test_masked(device, columns, recipe):
    """The first rows of each group; what is behind them is neither read nor written."""
    most, counts = 10, torch.tensor([10, 0, 1, 4], dtype=torch.int32)
    (qa, sa), (b, w) = codes(G, most, K), weights(device, 1 if recipe == (1, 1, 128) else 128)
    wanted = torch.einsum("gmk,gnk->gmn", values(qa, sa), w)
    for g, count in enumerate(counts):
        sa[g, count:] = torch.nan
    a = qa.to(device), by_columns(sa.to(device)) if columns else sa.to(device)
    d = torch.full((G, most, N), 7.0, dtype=torch.bfloat16, device=device)
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, counts.to(device), 4, recipe=recipe)
    for g, count in enumerate(counts):
        assert torch.all(d[g, count:] == 7)
        if count:
            assert distance(d[g, :count].float().cpu(), wanted[g, :count]) < BOUND


def test_what_is_refused():
    (qa, sa), (b, _) = codes(6, K), weights("cpu")
    d, indices = torch.full((6, N), 7.0, dtype=torch.bfloat16), torch.tensor([0, 0, 1, 1, -1, 3], dtype=torch.int32)
    call = lambda a=(qa, sa), b=b, d=d, indices=indices, **more: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices, **more)  # noqa: E731
    with pytest.raises(nibble.InvalidArgument, match=r"grouped_layout\[3\]=0: groups rise from 0 to 3, and the one before is 1"):
        call(indices=torch.tensor([0, 0, 1, 0, -1, 3], dtype=torch.int32))
    with pytest.raises(nibble.InvalidArgument, match=r"grouped_layout\[5\]=4: groups rise from 0 to 3"):
        call(indices=torch.tensor([0, 0, 1, 1, -1, 4], dtype=torch.int32))
    with pytest.raises(nibble.InvalidArgument, match=r"grouped_layout is int64 \[6\]; it takes int32 \[6\]"):
        call(indices=indices.long())
    with pytest.raises(nibble.InvalidArgument, match=r"it takes int32 \[4\]"):
        call(use_psum_layout=True)
    with pytest.raises(nibble.Unsupported, match="scales of a are int32.*ue8m0"):
        call((qa, sa[:, :1].int()))
    with pytest.raises(nibble.Unsupported, match=r"b is int8 \[4, 256, 384\]"):
        call(b=(b[0].view(torch.int8), b[1]))
    with pytest.raises(nibble.Unsupported, match="a scale for 128 tokens"):
        call(recipe=(128, 128, 128))
    with pytest.raises(nibble.InvalidArgument, match="give recipe, or the other two"):
        call(recipe_a=(1, 128))
    with pytest.raises(nibble.InvalidArgument, match=r"d is float32 \[6, 256\]; it takes bfloat16 \[6, 256\]"):
        call(d=d.float())
    with pytest.raises(nibble.InvalidArgument, match=r"scales of a are float32 \[6, 2\]; they take \[M, 3\]"):
        call((qa, sa[:, :2].contiguous()))
    with pytest.raises(nibble.InvalidArgument, match=r"scales of shape \[4, 2, 2\]"):
        call(b=(b[0], b[1][:, :, :2].contiguous()))
    with pytest.raises(nibble.InvalidArgument, match=r"masked_m is int32 \[6\]; it takes int32 \[4\]"):
        deep_gemm.m_grouped_fp8_gemm_nt_masked((qa.expand(G, 6, K), sa.expand(G, 6, 3)), b, d.expand(G, 6, N), indices, 4)
    assert torch.all(d == 7)
    empty = torch.empty(0, N, dtype=torch.bfloat16)
    assert call((qa[:0], sa[:0]), d=empty, indices=indices[:0]) is None
