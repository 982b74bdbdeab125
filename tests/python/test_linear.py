"""pack, linear, dequantize and quantize_activations against plain NumPy."""

from __future__ import annotations

import copy
import os
import pickle
import threading

import numpy as np
import pytest
from conftest import act_ordered, distance

import nibble

SCHEMES = ["u4b8g128", "u4zg64", "u3b4g32", "u8b128c", "u2zg16", "s8c", "s8t", "e4m3b64x128", "e4m3c", "f32", "f16", "bf16"]


def make(rng, scheme="u4zg128", n=40, k=256):
    w = rng.standard_normal((n, k), dtype=np.float32)
    return nibble.pack(nibble.quantize(w, scheme)), rng.standard_normal((5, k), dtype=np.float32)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_is_the_product_with_the_dequantized_weight(rng, scheme):
    w, x = make(rng, scheme)
    assert (w.n, w.k, w.scheme, w.backend) == (40, 256, scheme, "cpu")
    assert distance(w.linear(x), x.astype(np.float64) @ w.dequantize().T) < 1e-6
    assert np.array_equal(w.dequantize("f16", transposed=True), w.dequantize().T.astype(np.float16))
    assert w.unpack() == nibble.pack(w.unpack()).unpack()


def test_a_dense_weight_is_the_floats(rng):
    w = rng.standard_normal((8, 32), dtype=np.float32)
    q = nibble.quantize(w, "f16")
    assert q.scheme == "f16" and q.scales is None and q.bits_per_weight == 16
    assert q.codes.dtype == np.float16 and np.array_equal(q.codes, w.astype(np.float16))
    assert nibble.QuantTensor("f16", w.astype(np.float16)) == q and nibble.read_tensors({"weight": w.astype(np.float16)}) == q
    assert nibble.join([q, q]).shape == (16, 32) and pickle.loads(pickle.dumps(q)) == q
    brain = nibble.quantize(w, "bf16")
    assert nibble.QuantTensor("bf16", brain.codes) == brain
    with pytest.raises(nibble.InvalidArgument, match="f16 .N,K.; got f32"):
        nibble.QuantTensor("f16", w)
    with pytest.raises(nibble.InvalidArgument, match="70000 is beyond the range of f16"):
        nibble.quantize(np.full((1, 1), 70000, np.float32), "f16")
    with pytest.raises(nibble.Unsupported, match="not quantized either"):
        nibble.pack(q, act_scheme="s8r")


def test_any_leading_dimensions(rng):
    w, x = make(rng)
    y = w(x)
    assert np.array_equal(w(x[0]), w(x[:1])[0])
    assert w(x.reshape(5, 1, 256)).shape == (5, 1, 40)
    assert w(x[:0]).shape == (0, 40)
    both = np.stack([x, x])
    assert np.array_equal(w(both), w(both.reshape(10, 256)).reshape(2, 5, 40))
    assert np.array_equal(w(np.stack([x, x], axis=1)[:, 0]), y)  # rows further apart


def test_joined_layers_and_glu(rng):
    gate, up = (nibble.quantize(rng.standard_normal((20, 256), dtype=np.float32), "u4zg128") for _ in range(2))
    both = nibble.join([gate, up])
    assert both.shape == (40, 256) and np.array_equal(both.codes, np.concatenate([gate.codes, up.codes]))
    x = rng.standard_normal((5, 256), dtype=np.float32)
    parts = [x.astype(np.float64) @ nibble.pack(q).dequantize().T for q in (gate, up)]
    silu = lambda v: v / (1 + np.exp(-v))  # noqa: E731
    w = nibble.pack(both, glu=True)
    assert distance(w.linear(x, activation="silu"), silu(parts[0]) * parts[1]) < 1e-5
    residual = rng.standard_normal((5, 20), dtype=np.float32)
    assert distance(w.linear(x, residual=residual), parts[0] * parts[1] + residual) < 1e-5
    limited = nibble.pack(both, glu=True, glu_limit=7, glu_offset=1)
    expected = silu(parts[0].clip(None, 7)) * (parts[1].clip(-7, 7) + 1)
    assert distance(limited.linear(x, activation="silu"), expected) < 1e-5
    assert w.unpack() == both and w.explain(m_max=1)
    assert np.array_equal(pickle.loads(pickle.dumps(limited)).linear(x), limited.linear(x))
    with pytest.raises(nibble.InvalidArgument, match="packed for a glu"):
        w.dequantize()
    with pytest.raises(nibble.InvalidArgument, match="N=41 is odd"):
        nibble.pack(nibble.quantize(rng.standard_normal((41, 32), dtype=np.float32), "u4b8g32"), glu=True)
    with pytest.raises(nibble.InvalidArgument, match="K is 256 and 128"):
        nibble.join([gate, nibble.quantize(rng.standard_normal((20, 128), dtype=np.float32), "u4zg128")])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_before_a_layer(rng, kind):
    w, x = make(rng)
    x = x + np.float32(0.5)
    weight, bias = rng.random(256, dtype=np.float32), rng.standard_normal(256, dtype=np.float32)
    stream = rng.standard_normal((5, 256), dtype=np.float32)

    def normalized(x, bias=0.0):
        x = x.astype(np.float64)
        x = x - x.mean(-1, keepdims=True) * (kind == "layer")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (weight + 1.0) + bias

    dense = w.dequantize().T.astype(np.float64)
    norm = nibble.Norm(weight, kind=kind, eps=1e-5, weight_offset=1)
    assert distance(w.linear(x, norm=norm), normalized(x) @ dense) < 1e-5
    if kind == "layer":
        with_bias = nibble.Norm(weight, kind=kind, eps=1e-5, weight_offset=1, bias=bias)
        assert distance(w.linear(x, norm=with_bias), normalized(x, bias) @ dense) < 1e-5
    before = stream.copy()
    y = w.linear(x, norm=nibble.Norm(weight, kind=kind, eps=1e-5, weight_offset=1, residual=stream))
    assert np.array_equal(stream, before + x) and distance(y, normalized(stream) @ dense) < 1e-5
    ones = [np.full((5, 256), 0x3F80, np.uint16) for _ in range(2)]  # the bits of bf16
    w.linear(ones[0], norm=nibble.Norm(weight, kind=kind, residual=ones[1]))
    assert (ones[1] == 0x4000).all()
    with pytest.raises(nibble.InvalidArgument, match="no kind of norm"):
        w.linear(x, norm=nibble.Norm(weight, kind="batch"))
    with pytest.raises(nibble.InvalidArgument, match="norm_weight must be a contiguous vector of 256"):
        w.linear(x, norm=nibble.Norm(weight[:10], kind=kind))


def test_epilogue(rng):
    w, x = make(rng)
    base = x.astype(np.float64) @ w.dequantize().T
    bias, col = rng.standard_normal(40, dtype=np.float32), rng.random(40, dtype=np.float32) + 0.5
    row, gate = rng.random(5, dtype=np.float32) + 0.5, rng.standard_normal((5, 40), dtype=np.float32)
    residual = rng.standard_normal((5, 40)).astype(np.float16)
    got = w.linear(x, bias=bias, row_scale=row, col_scale=col, activation="relu", gate=gate, residual=residual)
    assert distance(got, np.maximum(base * row[:, None] * col + bias, 0) * gate + residual) < 1e-5
    assert distance(w.linear(x, activation="clamp", clamp=(-1, 2)), base.clip(-1, 2)) < 1e-5
    for activation, exact in (
        ("sigmoid", 1 / (1 + np.exp(-base))),
        ("tanh", np.tanh(base)),
        ("hardswish", base * (base + 3).clip(0, 6) / 6),
        ("leaky_relu", np.where(base < 0, 0.01 * base, base)),
        ("quick_gelu", base / (1 + np.exp(-1.702 * base))),
        ("relu6", base.clip(0, 6)),
    ):
        assert distance(w.linear(x, activation=activation), exact) < 1e-5, activation
    assert distance(w.linear(x, activation="leaky_relu", negative_slope=-2), np.where(base < 0, -2 * base, base)) < 1e-5
    for wrong, reason in (
        ({"activation": "leaky_relu", "negative_slope": np.inf}, "negative_slope=inf must be finite"),
        ({"activation": "relu6", "clamp": (0, 5)}, "relu6 is clamp with 0 and 6"),
        ({"activation": "swish"}, "no activation; write one of none, relu, clamp"),
    ):
        with pytest.raises(nibble.InvalidArgument, match=reason):
            w.linear(x, **wrong)
    codes = w.linear(x, out_dtype="s8", out_scale=0.5, out_zero=3)
    assert codes.dtype == np.int8 and np.abs(codes - (np.rint(base / 0.5) + 3).clip(-128, 127)).max() <= 1
    scales, zero = np.linspace(0.2, 0.9, base.shape[1], dtype=np.float32), np.array([100], np.int32)
    codes = w.linear(x, out_dtype="uint8", out_scale=scales, out_zero=zero, out_range=(90, 999))
    assert codes.dtype == np.uint8 and np.abs(codes - (np.rint(base / scales) + 100.0).clip(90, 255)).max() <= 1
    into = np.empty(base.shape, np.uint8)
    w.linear(x, out=into, out_scale=scales, out_zero=zero, out_range=(90, 999))
    assert (into == codes).all()
    with pytest.raises(nibble.InvalidArgument, match="two numbers or two arrays"):
        w.linear(x, out_dtype="s8", out_scale=scales)


def test_integer_sums(rng):
    q = nibble.quantize(rng.standard_normal((24, 64), dtype=np.float32), "s8c")
    w, x = nibble.pack(q), rng.integers(-128, 128, (5, 64), dtype=np.int8)
    scale, zero, bias = np.float32([0.02]), np.arange(-2, 3, dtype=np.int32), rng.integers(-9999, 9999, 24, dtype=np.int32)
    weight_codes = np.rint(w.dequantize() / q.scales.reshape(24, 1)).astype(np.int64)
    sums = x.astype(np.int64) @ weight_codes.T
    assert (w.linear(x, act_scheme="s8r", out_dtype="int32") == sums).all()
    assert (w.linear(x, act_scheme="s8r", out_dtype="int32", sum_bias=bias) == sums + bias).all()
    got = w.linear(x, a_scale=scale, a_zero=zero, act_scheme="s8zr", sum_bias=bias, bias=False)
    exact = (sums - zero[:, None] * weight_codes.sum(1) + bias) * scale * np.ravel(q.scales)
    assert np.allclose(got, exact, rtol=1e-6)
    with pytest.raises(nibble.Unsupported, match="pass A as s8 or u8, not f32"):
        w.linear(x.astype(np.float32), act_scheme="s8r", out_dtype="int32")


def test_the_weights_own_bias(rng):
    q = act_ordered(rng)
    w, x = nibble.pack(q), rng.standard_normal((3, 256), dtype=np.float32)
    assert w.has_bias and w.act_order
    assert distance(w(x) - w(x, bias=False), np.tile(q.bias, (3, 1))) < 1e-4
    assert np.array_equal(w(x, bias=True), w(x))
    assert np.array_equal(w(x, next=w), w(x))
    assert distance(w(x, bias=False), x @ w.dequantize().T) < 1e-5


def test_out_is_written(rng):
    w, x = make(rng)
    wide = np.full((5, 64), np.nan, np.float32)
    assert w.linear(x, out=wide[:, :40]) is not None
    assert np.array_equal(wide[:, :40], w(x)) and np.isnan(wide[:, 40:]).all()


def test_strides_of_every_kind(rng):
    """What is no matrix in memory is copied; the numbers are those of the copy."""
    w, x = make(rng)
    plain = w(x)
    wide = np.zeros((5, 512), np.float32)
    wide[:, ::2] = x
    for same in (wide[:, ::2], np.asfortranarray(x), np.ascontiguousarray(x[:, ::-1])[:, ::-1], np.ascontiguousarray(x[::-1])[::-1]):
        assert not same.flags.c_contiguous and np.array_equal(w(same), plain)
        codes, scales, _ = nibble.quantize_activations(same)
        assert all(map(np.array_equal, (codes, scales), nibble.quantize_activations(x)[:2]))
    swapped = rng.standard_normal((3, 2, 256), dtype=np.float32).transpose(1, 0, 2)
    assert np.array_equal(w(swapped), w(swapped.copy()))
    assert np.array_equal(w(np.broadcast_to(x[0], (4, 256))), w(np.tile(x[0], (4, 1))))
    operands = {name: np.asfortranarray(rng.standard_normal((5, 40), dtype=np.float32)) for name in ("gate", "residual")}
    operands |= {"bias": np.ones(80, np.float32)[::2], "row_scale": np.ones(10, np.float32)[::2], "col_scale": np.ones(80, np.float32)[::2]}
    assert np.array_equal(w.linear(x, **operands), w.linear(x, **{name: np.ascontiguousarray(a) for name, a in operands.items()}))
    floats = rng.standard_normal((256, 40), dtype=np.float32)
    assert nibble.quantize(floats.T, "u4b8g64") == nibble.quantize(floats.T.copy(), "u4b8g64")


def test_bits_of_bf16_and_fp8(rng):
    w, x = make(rng)
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)  # truncated
    y = w(bits)
    assert y.dtype == np.uint16
    exact = (bits.astype(np.uint32) << 16).view(np.float32) @ w.dequantize().T
    assert distance((y.astype(np.uint32) << 16).view(np.float32), exact) < 5e-3
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert np.array_equal(w(bits.view(ml_dtypes.bfloat16)).view(np.uint16), y)
    codes, scales, _ = nibble.quantize_activations(x, "e4m3r")
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(w(codes, a_scale=scales), w(codes.view(np.uint8), a_scale=scales))


@pytest.mark.parametrize("scheme", ["s8r", "s8zr", "s8g64", "e4m3r", "e4m3g128", "s8t", "s8zt", "e4m3t"])
def test_codes_of_activations(rng, scheme):
    w, x = make(rng)
    x += 0.3
    known = {"scale": 0.04, "zero": 5 if "z" in scheme else 0} if scheme.endswith("t") else {}
    codes, scales, zeros = nibble.quantize_activations(x, scheme, **known)
    assert (scales is None) == bool(known) and (zeros is None) == ("z" not in scheme or bool(known))
    if known:
        scales = np.array([known["scale"]], np.float32)
        zeros = np.array([known["zero"]], np.int32) if known["zero"] else None
    values = codes.astype(np.float32) if codes.dtype == np.int8 else codes_of_fp8(codes)
    spread = scales.reshape(-1, 1) if scales.ndim == 1 else scales.repeat(256 // scales.shape[1], axis=1)
    means = (values - (0 if zeros is None else zeros.reshape(-1, 1))) * spread
    assert distance(means, x) < (0.05 if scheme.startswith("e4m3") else 0.02)
    got = w.linear(codes, a_scale=scales, a_zero=zeros)
    assert got.dtype == np.float32 and distance(got, means @ w.dequantize().T) < 1e-5
    if not known:  # the same while running
        fused = nibble.pack(w.unpack(), act_scheme=scheme)
        assert fused.act_scheme == scheme and distance(fused(x), got) < 1e-5


@pytest.mark.parametrize("k", [33, 40, 160, 1300])
def test_groups_of_codes_are_those_that_the_weight_was_packed_for(rng, k):
    q = nibble.quantize(rng.standard_normal((16, k), dtype=np.float32), "s8c")
    x = rng.standard_normal((4, k), dtype=np.float32)
    codes, scales, _ = nibble.quantize_activations(x, "s8g16")  # the last group of a token has fewer channels
    y = nibble.pack(q, act_scheme="s8g16").linear(x)
    assert np.array_equal(nibble.pack(q, a_dtype="s8", act_scheme="s8g16").linear(codes, a_scale=scales), y)
    assert np.array_equal(nibble.pack(q).linear(codes, a_scale=scales, act_scheme="s8g16"), y)


@pytest.mark.parametrize("scheme", ["s8zr", "s8zg64", "s8zt"])
def test_u8_codes_of_activations(rng, scheme):
    w, x = make(rng)
    x += 0.3
    known = {"scale": 0.04, "zero": 5} if scheme.endswith("t") else {}
    codes, scales, zeros = nibble.quantize_activations(x, scheme, **known)
    if known:
        scales, zeros = np.array([0.04], np.float32), np.array([5], np.int32)
    u8 = (codes.astype(np.int16) + 128).astype(np.uint8)
    exact = w.linear(codes, a_scale=scales, a_zero=zeros)
    assert np.array_equal(w.linear(u8, a_scale=scales, a_zero=zeros + 128), exact)
    assert np.array_equal(w.linear(u8, a_scale=scales, a_zero=zeros + 128, act_scheme=scheme), exact)
    assert w.explain("u8", 8, act_scheme=scheme)[0].steps[0] == "prepare_s8_u8_none__cpu_baseline"
    with pytest.raises(nibble.InvalidArgument, match="a_zero must be s32"):
        w.linear(u8, a_scale=scales, act_scheme=scheme)
    with pytest.raises(nibble.Unsupported, match="pass codes − 128 as s8"):
        w.linear(u8, a_scale=scales, a_zero=zeros.astype(np.float32), act_scheme="s8or")


@pytest.mark.parametrize("scheme", ["s8or", "s8og64", "s8og32"])
def test_float_offsets_of_activations(rng, scheme):
    w, x = make(rng)
    x += 30
    codes, scales, offsets = nibble.quantize_activations(x, scheme)
    assert offsets.dtype == np.float32 and offsets.shape == scales.shape
    spread = [a.reshape(len(x), -1).repeat(256 // a.reshape(len(x), -1).shape[1], axis=1) for a in (scales, offsets)]
    means = codes * spread[0].astype(np.float64) + spread[1]
    assert np.abs(means - x).max() < 0.51 * scales.max()
    got = w.linear(codes, a_scale=scales, a_zero=offsets)
    assert distance(got, means @ w.dequantize().T) < 1e-5
    fused = nibble.pack(w.unpack(), act_scheme=scheme)
    assert fused.act_scheme == scheme and np.array_equal(fused(x), got)


def test_weights_with_offsets_are_made_in_memory(rng):
    weight = rng.normal(5, 1, (24, 96)).astype(np.float32)
    q = nibble.quantize(weight, "u4og32")
    assert q.zeros.shape == (24, 3) and distance(nibble.pack(q).dequantize(), weight) < 0.02


def test_zero_points_that_are_no_codes(rng):
    w, _ = make(rng)
    codes = rng.integers(-128, 128, (3, 256), dtype=np.int8)
    scales, zeros = np.float32([0.02, 0.01, 0.03]), np.int32([-700, 5, 70_000])
    means = (codes.astype(np.float64) - zeros[:, None]) * scales[:, None]
    assert distance(w.linear(codes, a_scale=scales, a_zero=zeros), means @ w.dequantize().T) < 1e-5


def test_nan_stays(rng):
    w, x = make(rng)
    x[1, 7] = np.nan
    for activation in ("relu", "clamp", "gelu_erf", "gelu_tanh", "silu", "sigmoid", "tanh", "hardswish", "leaky_relu", "quick_gelu", "relu6"):
        y = w.linear(x, activation=activation)
        assert np.isnan(y[1]).all() and np.isfinite(np.delete(y, 1, 0)).all()
    assert (w.linear(x, activation="relu", out_dtype="s8", out_zero=3)[1] == 0).all()


def codes_of_fp8(codes):
    bits = codes.view(np.uint8).astype(np.int32)
    exponent, fraction = bits >> 3 & 15, bits & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(bits & 128, -size, size).astype(np.float32)


def test_quant_tensor_of_arrays(rng):
    q = act_ordered(rng)
    again = nibble.QuantTensor(q.scheme, q.codes, q.scales, q.zeros, g_idx=q.g_idx.astype(np.int64), bias=q.bias)
    assert again == q and again.shape == (32, 256) and again.groups == 4 and again.group_shape == (1, 64)
    w = (q.codes.astype(np.float32) - q.zeros[:, q.g_idx]) * q.scales[:, q.g_idx].astype(np.float32)
    assert np.array_equal(nibble.pack(q).dequantize(), w)
    with pytest.raises(ValueError, match="read-only"):
        q.codes[0, 0] = 1
    codes = q.codes
    del q  # a view keeps what it shows
    assert codes.sum() == again.codes.sum()
    assert pickle.loads(pickle.dumps(again)) == again
    packed = pickle.loads(pickle.dumps(nibble.pack(again)))
    assert packed.unpack() == again and copy.deepcopy(packed) is packed


def test_equal_tensors_are_one_key(rng):
    q = nibble.quantize(rng.standard_normal((8, 64), dtype=np.float32), "u4zg32")
    again, other = pickle.loads(pickle.dumps(q)), nibble.quantize(rng.standard_normal((8, 64), dtype=np.float32), "u4zg32")
    assert again == q and hash(again) == hash(q) and {q: 1}[again] == 1
    assert other != q and len({q, again, other}) == 2


def test_a_weight_remembers_what_it_was_packed_for(rng):
    q = nibble.quantize(rng.standard_normal((64, 256), dtype=np.float32), "u4zg64")
    w = nibble.pack(q, a_dtype="bf16", act_scheme="s8r", m_max=24)
    for same in (w, pickle.loads(pickle.dumps(w))):
        assert (same.a_dtype, same.m_max, same.act_scheme) == ("bf16", 24, "s8r")
        buckets = same.explain()
        assert buckets[-1].m_high == 32 and [b.steps for b in buckets] == [b.steps for b in same.explain("bf16", 24, act_scheme="s8r")]
    assert nibble.pack(q).a_dtype == "f32" and w.explain("f32", 8)[-1].m_high == 8


def test_accumulation(rng):
    q = nibble.quantize(rng.standard_normal((40, 1024), dtype=np.float32), "e4m3c")
    x = rng.standard_normal((3, 1024), dtype=np.float32)
    fast, precise = nibble.pack(q, act_scheme="e4m3r"), nibble.pack(q, act_scheme="e4m3r", accumulation="precise")
    assert (fast.accumulation, precise.accumulation) == ("fast", "precise")
    assert pickle.loads(pickle.dumps(precise)).accumulation == "precise"
    for y in (precise(x), fast.linear(x, accumulation="precise"), precise.linear(x, accumulation="fast")):
        assert np.array_equal(y, fast(x))  # a CPU has no choice
    assert (precise._weight.plans, fast._weight.plans) == (2, 2)
    assert fast.explain(act_scheme="e4m3r", accumulation="precise")
    assert nibble.verify(q, "f16", 3, act_scheme="e4m3r", accumulation="precise")
    for call in (lambda: nibble.pack(q, accumulation="exact"), lambda: fast.linear(x, accumulation="f32")):
        with pytest.raises(nibble.InvalidArgument, match="no accumulation; write fast or precise"):
            call()


def test_explain_verify_and_forced_kernels(rng):
    w, x = make(rng)
    report = nibble.verify(w.unpack(), "f16", 3)
    assert report and report.round_trip and report.worst_error_over_bound <= 1
    buckets = w.explain("f32", 64)
    assert buckets[0].m_low == 1 and buckets[-1].m_high == 64
    assert any(c.refusal for b in buckets for c in b.candidates)
    # Of what is not packed, also for a GPU that is not there.
    q = w.unpack()
    here = nibble.explain(q, m_max=64)
    assert [(b.m_high, b.steps) for b in here] == [(b.m_high, b.steps) for b in nibble.pack(q, m_max=64).explain()]
    q = nibble.quantize(rng.standard_normal((256, 256), dtype=np.float32), "u4b8g128")
    there = nibble.explain(q, gpu="h200", a_dtype="f16", m_max=64)
    assert there[-1].m_high == 64 and all("__cuda_" in b.steps[-1] for b in there)
    with pytest.raises(nibble.NotFound, match="h100 and h200"):
        nibble.explain(q, gpu="a100")
    with pytest.raises(nibble.InvalidArgument, match="write cpu or cuda"):
        nibble.explain(q, backend="gpu")
    reference = nibble.kernels()[-1].name
    assert "ref" in reference
    slow = nibble.pack(w.unpack(), kernel="linear_any_any_any__ref_baseline")
    assert distance(slow.linear(x, kernel="linear_any_any_any__ref_baseline"), w(x)) < 1e-5
    assert nibble.quantization_error(w.dequantize(), w.unpack()).max_abs == 0
    assert nibble.Linear(w, activation="relu")(x).min() == 0


def test_threads_share_a_weight(rng):
    w, x = make(rng)
    expected = {m: w(np.tile(x, (m, 1))) for m in (1, 3, 7, 20)}
    w = nibble.pack(w.unpack())  # no plans yet
    wrong = []

    def work():
        for m, y in list(expected.items()) * 5:
            if not np.array_equal(w(np.tile(x, (m, 1))), y):
                wrong.append(m)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_has_threads_of_its_own(rng):
    w, x = make(rng)
    y = w.linear(x)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if np.array_equal(w.linear(x), y) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_doctor():
    report = nibble.doctor()
    assert report["isa"] in report["isas"] and report["kernels"] == len(nibble.kernels()) and "awq" in report["formats"]
    assert report["gpu"] is not None or report["gpu_reason"]
    assert any(layout.name == "plain" and layout.drawing for layout in nibble.layouts())


def test_other_frameworks_get_their_own_arrays_back(rng):
    jnp = pytest.importorskip("jax.numpy")
    w, x = make(rng)
    for dtype in (jnp.float32, jnp.bfloat16):
        xj = jnp.asarray(x, dtype)
        y = w(xj)
        assert isinstance(y, type(xj)) and y.dtype == dtype
    assert np.array_equal(np.asarray(w(jnp.asarray(x))), w(x))
    with pytest.raises(nibble.InvalidArgument, match="immutable"):
        w(x, out=jnp.zeros((5, 40)))
