"""One product of rows that have an expert each, against the product of each expert's rows alone, of NumPy arrays and tensors."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import distance

import nibble

E, K, N = 5, 128, 48
COUNTS = np.array([3, 0, 7, 1, 4], np.int32)
OFFSETS = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
R, MOST = int(OFFSETS[-1]), 7


def packed(rng, scheme="u4zg32", bias=True, **spec):
    qs = [nibble.quantize(rng.standard_normal((N, K), dtype=np.float32), scheme) for _ in range(E)]
    if bias:
        qs = [with_bias(q, rng.standard_normal(N, dtype=np.float32)) for q in qs]
    return nibble.pack_experts(qs, **spec)


def with_bias(q, bias):
    return nibble.QuantTensor(q.scheme, q.codes, q.scales, q.zeros, bias=bias)


def one_by_one(x, experts, **options):
    """By the linear layer of each expert. options: arrays of rows, or values."""
    y = []
    for e, (first, count) in enumerate(zip(OFFSETS, COUNTS)):
        mine = slice(first, first + count)
        own = {name: v[mine] if np.shape(v)[:1] == (R,) else v for name, v in options.items()}
        y.append(np.asarray(experts[e].linear(x[mine], **own), np.float32))
    return np.concatenate(y)


def padded(values, fill=0):
    """[R, ...] as [E, MOST, ...]."""
    out = np.full((E, MOST, *values.shape[1:]), fill, values.dtype)
    for e, (first, count) in enumerate(zip(OFFSETS, COUNTS)):
        out[e, :count] = values[first : first + count]
    return out


def unpadded(values):
    return np.concatenate([values[e, :count] for e, count in enumerate(COUNTS)])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_forms_of_rows(rng, dtype):
    experts = packed(rng)
    x = rng.standard_normal((R, K), dtype=np.float32).astype(dtype)
    wanted = one_by_one(x, experts)
    y = nibble.grouped(x, experts, offsets=OFFSETS)
    assert y.dtype == dtype and y.shape == (R, N) and np.array_equal(y.astype(np.float32), wanted)

    tokens, rows = x[:4], rng.integers(0, 4, R, dtype=np.int32)
    y = nibble.grouped(tokens, experts, offsets=OFFSETS, rows=rows)
    assert np.array_equal(y.astype(np.float32), one_by_one(tokens[rows], experts))

    out = np.full((E, MOST, N), 7, dtype)
    y = nibble.grouped(padded(x, fill=np.nan), experts, counts=COUNTS, out=out)
    assert y is out and np.array_equal(unpadded(y).astype(np.float32), wanted)
    assert all(np.all(y[e, count:] == 7) for e, count in enumerate(COUNTS))
    wide = np.full((E, MOST, 2 * K), np.nan, dtype)  # matrices and rows apart
    wide[:, :, :K] = padded(x)
    assert np.array_equal(unpadded(nibble.grouped(wide[:, :, :K], experts, counts=COUNTS)).astype(np.float32), wanted)


def test_epilogue(rng):
    experts = packed(rng)
    x = rng.standard_normal((R, K), dtype=np.float32)
    options = {"row_scale": rng.random(R, dtype=np.float32), "residual": rng.standard_normal((R, N), dtype=np.float32),
               "gate": rng.standard_normal((R, N), dtype=np.float32)}  # fmt: skip
    wanted = one_by_one(x, experts, activation="silu", **options)
    assert np.array_equal(nibble.grouped(x, experts, offsets=OFFSETS, activation="silu", **options), wanted)
    of_all = {name: padded(v, fill=np.nan) for name, v in options.items()}
    y = nibble.grouped(padded(x), experts, counts=COUNTS, activation="silu", **of_all)
    assert np.array_equal(unpadded(y), wanted)
    halves = nibble.grouped(x, experts, offsets=OFFSETS, out_dtype="f16")
    assert halves.dtype == np.float16 and distance(halves, one_by_one(x, experts)) < 1e-3
    glu = packed(rng, glu=True)
    y = nibble.grouped(x, glu, offsets=OFFSETS, activation="silu")
    assert y.shape == (R, N // 2) and np.array_equal(y, one_by_one(x, glu, activation="silu"))


@pytest.mark.parametrize("scheme, act", [("s8c", "s8r"), ("u4b8g32", "s8g32"), ("e4m3b128x128", "e4m3g128"), ("s8c", "s8t"), ("s8c", "s8zr")])
def test_codes(rng, scheme, act):
    experts = packed(rng, scheme, bias=scheme != "e4m3b128x128", act_scheme="" if act == "s8t" else act)
    x = rng.standard_normal((R, K), dtype=np.float32)
    codes, scales, zeros = nibble.quantize_activations(x, act, **({"scale": 0.02} if act == "s8t" else {}))
    options = {"a_scale": np.array([0.02], np.float32) if scales is None else scales} | ({} if zeros is None else {"a_zero": zeros})
    wanted = one_by_one(codes, experts, **options)
    y = nibble.grouped(codes, experts, offsets=OFFSETS, **options)
    assert y.dtype == np.float32 and np.array_equal(y, wanted)
    of_all = {name: padded(v) if v.shape[0] == R else v for name, v in options.items()}
    assert np.array_equal(unpadded(nibble.grouped(padded(codes), experts, counts=COUNTS, **of_all)), wanted)
    if act != "s8t":  # float rows, quantized on the way
        assert np.array_equal(nibble.grouped(x, experts, offsets=OFFSETS), one_by_one(x, experts))


@pytest.mark.parametrize("scheme, act", [("u4zg32", ""), ("s8c", "s8r")])
def test_ids(rng, scheme, act):
    """Pairs of a token and an expert in the order of tokens, of one row a token and of one a pair."""
    experts = packed(rng, scheme, act_scheme=act)
    x = rng.standard_normal((2, 3, K), dtype=np.float32)
    ids = np.array([[[0, 4], [4, 2], [-1, 4]], [[3, 0], [-1, -1], [0, 2]]], np.int32)
    flat, each = ids.ravel(), np.repeat(x, 2, 1).reshape(2, 3, 2, K)
    options = {"row_scale": rng.random((2, 3, 2), dtype=np.float32), "gate": rng.standard_normal((2, 3, 2, N), dtype=np.float32),
               "residual": rng.standard_normal((2, 3, 2, N), dtype=np.float32)}  # fmt: skip
    for more in ({}, {"activation": "silu", **options}):
        wanted = np.zeros((12, N), np.float32)
        for e in range(E):
            mine = np.flatnonzero(flat == e)
            if mine.size:
                own = {name: v.reshape(12, *v.shape[3:])[mine] if name in options else v for name, v in more.items()}
                wanted[mine] = experts[e].linear(np.ascontiguousarray(each.reshape(12, K)[mine]), **own)
        for rows in (x, each):
            y = nibble.grouped(rows, experts, ids=ids, **more)
            assert y.shape == (2, 3, 2, N) and np.array_equal(y.reshape(12, N), wanted)
    out = np.full((2, 3, 2, N), 7, np.float16)
    half = nibble.grouped(x.astype(np.float16), experts, ids=ids, out=out)
    assert half is out and np.all(out[ids == -1] == 0) and np.all(np.any(out[ids >= 0] != 0, -1))
    strided = np.stack([ids, ids], -1)[..., 0]
    assert np.array_equal(nibble.grouped(each, experts, ids=strided), nibble.grouped(each, experts, ids=ids))
    assert nibble.grouped(x[:0], experts, ids=ids[:0]).shape == (0, 3, 2, N)

    def refused(match, kind=nibble.InvalidArgument, x=x, **given):
        with pytest.raises(kind, match=match):
            nibble.grouped(x, experts, **{"ids": ids, **given})

    refused(r"ids must be s32 \[6,2\], got s64 \[6,2\]", ids=ids.astype(np.int64))
    refused(r"ids\[0,1\]=5 is outside \[-1, 4\]", ids=np.where(ids == 4, E, ids))
    refused(r"x has shape \[2, 3, 128\] and ids \[2, 2, 2\]; the experts take x \[\.\.\., 128\] or", ids=ids[:, :2])
    refused(r"x has shape \[2, 3, 64\] and ids", x=x[:, :, :64])
    refused(r"residual must be \[12,48\]", residual=np.zeros((2, 3, N), np.float32))
    refused("or ids alone", offsets=OFFSETS)


def test_nothing(rng):
    experts = packed(rng)
    none = np.zeros(E + 1, np.int32)
    assert nibble.grouped(np.empty((0, K), np.float32), experts, offsets=none).shape == (0, N)
    assert nibble.grouped(np.empty((E, 0, K), np.float32), experts, counts=none[:E]).shape == (E, 0, N)
    out = np.full((E, MOST, N), 7, np.float32)
    nibble.grouped(np.ones((E, MOST, K), np.float32), experts, counts=none[:E], out=out)
    assert np.all(out == 7)


def test_errors(rng):
    experts = packed(rng)
    x, out = np.ones((R, K), np.float32), np.full((R, N), 7, np.float32)
    call = lambda x=x, **options: nibble.grouped(x, experts, **{"out": out, **options})  # noqa: E731
    with pytest.raises(nibble.InvalidArgument, match="takes offsets"):
        call()
    with pytest.raises(nibble.InvalidArgument, match=r"offsets must be s32 \[6\], got s64 \[6\]"):
        call(offsets=OFFSETS.astype(np.int64))
    with pytest.raises(nibble.InvalidArgument, match=r"offsets end at 15, A has 14 rows"):
        call(x[:14], offsets=OFFSETS)
    with pytest.raises(nibble.InvalidArgument, match=r"offsets\[2\]=1: they rise"):
        call(offsets=np.array([0, 3, 1, 10, 11, 15], np.int32))
    with pytest.raises(nibble.InvalidArgument, match=r"x has shape \[15, 128\]; the experts take \[E, R, 128\] with counts"):
        call(counts=COUNTS)
    with pytest.raises(nibble.InvalidArgument, match=r"x has shape \[15, 64\]; the experts take \[R, 128\] with offsets, \[E, R, K\] with counts, \[\.\.\., K\] with ids"):
        call(x[:, :64], offsets=OFFSETS)
    with pytest.raises(nibble.InvalidArgument, match=r"counts\[2\]=7 is outside \[0, 3\]"):
        nibble.grouped(np.ones((E, 3, K), np.float32), experts, counts=COUNTS)
    with pytest.raises(nibble.InvalidArgument, match=r"rows\[0\]=15 is outside"):
        call(offsets=OFFSETS, rows=np.full(R, R, np.int32))
    with pytest.raises(nibble.InvalidArgument, match=r"residual must be \[15,48\]"):
        call(offsets=OFFSETS, residual=np.ones((3, N), np.float32))
    with pytest.raises(nibble.Unsupported, match="rows are for an A of floats"):
        nibble.grouped(np.ones((4, K), np.int8), packed(rng, "s8c", act_scheme="s8r"), offsets=OFFSETS, rows=np.zeros(R, np.int32),
                       a_scale=np.ones(4, np.float32))  # fmt: skip
    assert np.all(out == 7)


def test_tensors(rng):
    torch = pytest.importorskip("torch")
    experts = packed(rng)
    x = torch.randn(R, K, dtype=torch.bfloat16)
    offsets, counts = torch.from_numpy(OFFSETS), torch.from_numpy(COUNTS)
    y = nibble.grouped(x, experts, offsets=offsets)
    assert y.dtype == torch.bfloat16 and y.shape == (R, N)
    for e in range(E):
        mine = slice(OFFSETS[e], OFFSETS[e + 1])
        if COUNTS[e]:
            assert torch.equal(y[mine], experts[e].linear(x[mine]))
    apart = torch.zeros(E, MOST, K, dtype=torch.bfloat16)
    for e in range(E):
        apart[e, : COUNTS[e]] = x[OFFSETS[e] : OFFSETS[e + 1]]
    out = torch.zeros(E, MOST, N, dtype=torch.bfloat16)
    assert nibble.grouped(apart, experts, counts=counts, out=out) is out
    assert torch.equal(torch.cat([out[e, :count] for e, count in enumerate(COUNTS)]), y)
    strided = torch.stack([offsets, offsets], 1)[:, 0]  # indices may lie as they like
    assert torch.equal(nibble.grouped(x, experts, offsets=strided), y)
