"""quantize_conv and PackedWeight.conv against a convolution written out in NumPy."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from conftest import distance

import nibble


def conv2d(x, rows, kernel, stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1):
    """rows [Co, Kh·Kw·C/groups], in that order; padding is top, bottom, left, right."""
    top, bottom, left, right = padding
    x = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 0), (top, bottom), (left, right)))
    (batch, channels, height, width), (n, (kh, kw)) = x.shape, (len(rows), kernel)
    oh, ow = ((s - d * (k - 1) - 1) // t + 1 for s, d, k, t in zip((height, width), dilation, kernel, stride))
    w = rows.reshape(groups, n // groups, kh, kw, channels // groups)
    y = np.zeros((batch, groups, n // groups, oh, ow))
    for i in range(kh):
        for j in range(kw):
            rest = x[:, :, i * dilation[0] :, j * dilation[1] :][:, :, :: stride[0], :: stride[1]][:, :, :oh, :ow]
            y += np.einsum("bgchw,gnc->bgnhw", rest.reshape(batch, groups, channels // groups, oh, ow), w[:, :, i, j])
    return y.reshape(batch, n, oh, ow)


def nhwc(x):
    """The same images, the channels of a pixel side by side."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)


def make(rng, scheme="u4zg16", n=24, c=16, kernel=(3, 3), groups=1, act_scheme=""):
    q = nibble.quantize_conv(rng.standard_normal((n, c // groups, *kernel), dtype=np.float32), scheme)
    return nibble.pack(q, act_scheme=act_scheme), rng.standard_normal((2, c, 9, 11), dtype=np.float32)


def test_rows_are_in_the_order_kh_kw_channel(rng):
    w = rng.standard_normal((8, 4, 3, 2), dtype=np.float32)
    q = nibble.quantize_conv(w, "u8b128c")
    assert (q.n, q.k, q.filter) == (8, 24, (3, 2))
    assert q == nibble.quantize_conv(nhwc(w), "u8b128c")
    packed = nibble.pack(q)
    assert packed.filter == (3, 2) and packed.unpack() == q
    assert distance(packed.dequantize(), w.transpose(0, 2, 3, 1).reshape(8, 24)) < 0.01
    for same in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q), nibble.QuantTensor(**nibble._fields(q))):
        assert same == q and same.filter == (3, 2)


@pytest.mark.parametrize("scheme", ["u4zg16", "u4b8g48", "u8b128c", "s8c", "u3zg16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"stride": 2, "padding": (1, 2)},
        {"stride": (2, 1), "padding": (0, 1, 2, 3), "dilation": (1, 2)},
    ],
)
def test_conv_is_the_convolution_with_the_dequantized_weight(rng, scheme, options):
    w, x = make(rng, scheme)
    exact = conv2d(x, w.dequantize(), w.filter, nibble._pair(options.get("stride", 1)), nibble._padding(options.get("padding", 0)),
                   nibble._pair(options.get("dilation", 1)))  # fmt: skip
    y = w.conv(x, **options)
    assert y.flags.c_contiguous and distance(y, exact) < 1e-6
    last = w.conv(nhwc(x), **options)
    assert last.transpose(0, 2, 3, 1).flags.c_contiguous and distance(last, exact) < 1e-6
    assert w.conv(nhwc(x), channels_last=False, **options).flags.c_contiguous
    assert np.array_equal(w.conv(x, channels_last=True, **options), y)
    assert distance(w.conv(x.astype(np.float16), **options), exact) < 2e-3
    assert np.array_equal(nibble.Conv(w, **options)(x, activation="relu"), np.maximum(y, 0))


@pytest.mark.parametrize("groups", [2, 16])
def test_groups(rng, groups):
    w, x = make(rng, "u8b128c", n=32, groups=groups)
    for images in (x, nhwc(x)):
        y = w.conv(images, padding=1, groups=groups)
        assert distance(y, conv2d(x, w.dequantize(), (3, 3), padding=(1, 1, 1, 1), groups=groups)) < 1e-6


def test_images_of_any_strides(rng):
    w = nibble.pack(nibble.quantize_conv(rng.standard_normal((8, 16, 3, 3), dtype=np.float32), "u8b128c"))
    x = rng.standard_normal((2, 16, 8, 6), dtype=np.float32)
    wide = np.zeros((2, 16, 8, 12), np.float32)
    wide[..., ::2] = x
    turned = np.ascontiguousarray(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    for same in (wide[..., ::2], turned, np.asfortranarray(x), np.ascontiguousarray(x[:, ::-1])[:, ::-1]):
        assert np.array_equal(w.conv(same), w.conv(x))
    one = np.broadcast_to(x[:1], x.shape)
    assert np.array_equal(w.conv(one), w.conv(one.copy()))


def test_pointwise_and_single_pixels(rng):
    w, x = make(rng, kernel=(1, 1))
    exact = conv2d(x, w.dequantize(), (1, 1))
    assert distance(w.conv(x), exact) < 1e-6 and distance(w.conv(nhwc(x)), exact) < 1e-6
    pixel = np.ascontiguousarray(x[:, :, :1, :1])
    assert distance(w.conv(pixel), exact[:, :, :1, :1]) < 1e-6
    assert np.array_equal(w.conv(nhwc(pixel))[:, :, 0, 0], w.linear(pixel[:, :, 0, 0]))


def test_epilogue(rng):
    w, x = make(rng)
    base = conv2d(x, w.dequantize(), (3, 3), padding=(1, 1, 1, 1))
    bias, col = rng.standard_normal(24, dtype=np.float32), rng.random(24, dtype=np.float32) + 0.5
    gate, residual = rng.standard_normal((2, *base.shape)).astype(np.float32)
    exact = np.maximum(base * col[:, None, None] + bias[:, None, None], 0) * gate + residual
    options = dict(padding=1, bias=bias, col_scale=col, activation="relu")
    assert distance(w.conv(x, gate=gate, residual=residual, **options), exact) < 1e-5
    assert distance(w.conv(nhwc(x), gate=nhwc(gate), residual=nhwc(residual), **options), exact) < 1e-5
    codes = w.conv(x, padding=1, out_dtype="s8", out_scale=0.5, out_zero=3)
    assert codes.dtype == np.int8 and np.abs(codes - (np.rint(base / 0.5) + 3).clip(-128, 127)).max() <= 1


def test_quantized_activations(rng):
    w, x = make(rng, "s8c", act_scheme="s8r")
    assert 0 < distance(w.conv(x, padding=1), conv2d(x, w.dequantize(), (3, 3), padding=(1, 1, 1, 1))) < 0.02
    codes, scale, zero = (x * 50).clip(-128, 127).astype(np.int8), np.float32([0.02]), np.int32([7])
    exact = conv2d((codes.astype(np.float64) - 7) * scale, w.dequantize(), (3, 3), padding=(1, 1, 1, 1))
    for images in (codes, nhwc(codes)):
        y = w.conv(images, padding=1, a_scale=scale, a_zero=zero)
        assert y.dtype == np.float32 and distance(y, exact) < 1e-6
        assert np.array_equal(w.conv(images.view(np.uint8) ^ 128, padding=1, a_scale=scale, a_zero=zero + 128), y)
    with pytest.raises(ValueError, match=r"a_zero=128 is outside \[-128, 127\]"):  # padding would be filled with it
        w.conv(codes, padding=1, a_scale=scale, a_zero=np.int32([128]))
    exact = conv2d((codes.astype(np.float64) - 128) * scale, w.dequantize(), (3, 3))
    assert distance(w.conv(codes, a_scale=scale, a_zero=np.int32([128])), exact) < 1e-6


def test_out_batches_and_plans(rng):
    w, x = make(rng)
    y = w.conv(x, padding=1)
    for out in (np.zeros_like(y), nhwc(np.zeros_like(y)), np.zeros((2, 40, 9, 11), np.float32)[:, 8:32]):
        assert w.conv(x, padding=1, out=out) is out
        assert np.array_equal(out, y)
    assert distance(w.conv(x[:1], padding=1), y[:1]) < 1e-6  # fewer pixels may take another kernel
    assert w.conv(x[:0], padding=1).shape == (0, 24, 9, 11)
    plans = w._weight.plans
    w.conv(x, padding=(1, 1))
    assert w._weight.plans == plans


X = np.ones((1, 16, 5, 5), np.float32)


@pytest.mark.parametrize(
    "x, options, error, words",
    [
        (X[0], {}, ValueError, r"\[16, 5, 5\].*\[B, C, H, W\]"),
        (X[:, :8], {}, ValueError, "takes 16 channels"),
        (X, {"groups": 2}, ValueError, "takes 32 channels"),
        (X, {"groups": 0}, ValueError, "groups"),
        (X[:, :, :2], {}, ValueError, "output of 0x3: the filter does not fit"),
        (X, {"padding": -1}, ValueError, "negative"),
        (X, {"stride": 0}, ValueError, "at least 1"),
        (X, {"stride": 1 << 40}, ValueError, "a size of"),
        (X, {"out": np.zeros((1, 24, 3, 4), np.float32)}, ValueError, r"\[1,24,3,3\]"),
        (X, {"residual": np.zeros((1, 24, 3, 2), np.float32)}, ValueError, "residual"),
        (X, {"gate": nhwc(np.zeros((1, 24, 3, 3), np.float32))}, ValueError, "not nchw"),
        (X, {"bias": np.ones(23, np.float32)}, ValueError, "24 elements"),
        (X, {"act_scheme": "s8g32"}, NotImplementedError, "blocks of 32"),
        (X.astype(np.int8), {}, ValueError, "a_scale"),
        (X.astype(np.int8), {"a_scale": np.ones(2, np.float32)}, ValueError, "a_scale"),
        ("x", {}, TypeError, "str"),
    ],
)
def test_errors(rng, x, options, error, words):
    with pytest.raises(error, match=words):
        make(rng, "u4b8g16")[0].conv(x, **options)


def test_bad_kernels(rng):
    with pytest.raises(nibble.InvalidArgument, match=r"\[Co,Ci/groups,Kh,Kw\]"):
        nibble.quantize_conv(np.ones((8, 16), np.float32))
    q = nibble.quantize(rng.standard_normal((8, 32), dtype=np.float32), "u8b128c")
    with pytest.raises(nibble.InvalidArgument, match="3x1 elements"):
        nibble.QuantTensor(**nibble._fields(q, filter=(3, 1)))


def test_jax(rng):
    jnp = pytest.importorskip("jax.numpy")
    w, x = make(rng)
    y = w.conv(jnp.asarray(x), padding=1)
    assert type(y).__module__.startswith("jax") and np.array_equal(np.asarray(y), w.conv(x, padding=1))


@pytest.mark.parametrize(("scheme", "quantize"), [("u4zg16", ""), ("u4oci16", ""), ("u4b8g32", "s8g32"), ("s8c", "s8r")])
def test_verify_conv(rng, scheme, quantize):
    q = nibble.quantize_conv(rng.standard_normal((24, 32, 3, 3), dtype=np.float32), scheme)
    for options in ({}, {"stride": 2, "padding": (1, 0, 2, 1), "dilation": (1, 2), "channels_last": True}):
        report = nibble.verify_conv(q, (9, 11), act_scheme=quantize, groups=2, **options)
        assert report and report.round_trip and report.kernel.startswith("conv_")
    with pytest.raises(nibble.InvalidArgument, match="does not fit into the padded image"):
        nibble.verify_conv(q, (2, 11))


@pytest.mark.parametrize("order", ["low_first", "high_first"])
def test_codes_two_to_a_byte_and_scales_of_all_elements(rng, order):
    codes = rng.integers(0, 16, (24, 3 * 3 * 16), dtype=np.uint8)
    scales, offsets = rng.uniform(0.1, 1, (24, 2)).astype(np.float32), rng.standard_normal((24, 2)).astype(np.float32)
    first, second = codes[:, ::2], codes[:, 1::2]
    packed = first | second << 4 if order == "low_first" else first << 4 | second
    q = nibble.QuantTensor("u4oci8", packed, scales, offsets, filter=(3, 3), nibble_order=order)
    runs = nibble.QuantTensor("u4og8", codes, np.tile(scales, 9), np.tile(offsets, 9), filter=(3, 3))
    assert q.scheme == "u4oci8" and q.scales.shape == q.zeros.shape == (24, 2)
    assert (nibble.pack(q).dequantize() == nibble.pack(runs).dequantize()).all()
    with pytest.raises(nibble.InvalidArgument, match=r"scales has shape \[24,18\], expected \[24,2\]"):
        nibble.QuantTensor("u4oci8", codes, np.tile(scales, 9), np.tile(offsets, 9), filter=(3, 3))
    report = nibble.verify_conv(q, (9, 11))
    assert report and report.round_trip
    for wrong, reason in (({"nibble_order": "big"}, "neither low_first nor high_first"), ({"nibble_order": order, "k": 3}, "that takes")):
        with pytest.raises(nibble.InvalidArgument, match=reason):
            nibble.QuantTensor("u4og8", packed, scales, offsets, **wrong)


def test_codes_as_tensorrt_llm_lays_them_out(rng):
    codes = rng.integers(0, 16, (24, 64), dtype=np.uint8)
    scales = rng.uniform(0.1, 1, (24, 2)).astype(np.float32)
    signed = (codes ^ 8).reshape(-1)
    packed = (signed[::2] | signed[1::2] << 4).reshape(64, 12)
    q = nibble.QuantTensor("u4b8g32", packed, scales, nibble_order="trtllm_transposed")
    assert q == nibble.QuantTensor("u4b8g32", codes, scales)
    assert nibble.QuantTensor("u4b8g32", packed, scales, nibble_order="trtllm_interleaved") != q
    for scheme, shape, reason in (("u4zg32", (64, 12), "are u4b8 or u8b128"), ("u4b8g32", (48, 16), "K in multiples of 64")):
        with pytest.raises(nibble.InvalidArgument, match=reason):
            nibble.QuantTensor(scheme, packed.reshape(shape), scales, nibble_order="trtllm_interleaved")
