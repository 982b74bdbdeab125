"""Whatever is passed, an exception with the values comes back, and nothing was written."""

from __future__ import annotations

import numpy as np
import pytest

import nibble


@pytest.fixture
def w(rng):
    return nibble.pack(nibble.quantize(rng.standard_normal((40, 256), dtype=np.float32), "u4zg128"))


X = np.ones((3, 256), np.float32)


@pytest.mark.parametrize(
    "x, options, error, words",
    [
        (np.ones((3, 128), np.float32), {}, ValueError, r"\[3, 128\].*W\[40,256\]"),
        (np.float32(1), {}, ValueError, r"\[\]"),
        (np.ones((3, 256)), {}, NotImplementedError, r"x is float64, .*x\.astype\('float32'\)"),
        (np.ones((3, 256), np.int64), {}, NotImplementedError, "x is int64"),
        (np.ones((3, 256), bool), {}, NotImplementedError, "x is bool"),
        (X, {"out": np.empty((3, 40))}, NotImplementedError, "out is float64"),
        (X, {"out_dtype": np.float64}, NotImplementedError, "out_dtype is float64"),
        (X, {"residual": np.ones((3, 40))}, NotImplementedError, "residual is float64"),
        (np.ones((3, 256), np.complex64), {}, ValueError, "complex64"),
        (np.array([[object()] * 256]), {}, ValueError, "'O'"),
        ([1.0] * 256, {}, TypeError, "list"),
        (None, {}, TypeError, "NoneType"),
        ("x", {}, TypeError, "str"),
        (X, {"out": np.empty((2, 40), np.float32)}, ValueError, r"\[2,40\].*\[3,40\]"),
        (X, {"out": np.empty((3, 39), np.float32)}, ValueError, r"\[3,39\].*\[3,40\]"),
        (X, {"out": np.empty((3, 80), np.float32)[:, ::2]}, ValueError, "stride"),
        (X, {"out": np.broadcast_to(np.float32(0), (3, 40))}, TypeError, "writing"),
        (X, {"out": np.lib.stride_tricks.as_strided(np.empty(120, np.float32), (3, 40), (4, 4))}, ValueError, "overlap"),
        (X, {"out": np.empty((3, 40), np.float16), "out_dtype": "f32"}, ValueError, "f16"),
        (X, {"out": np.empty((3, 40), np.int16)}, NotImplementedError, "out is int16"),
        (X, {"out": np.empty((3, 40), np.int32)}, NotImplementedError, "is for W8A8"),
        (X, {"bias": np.ones(39, np.float32)}, ValueError, "40 elements"),
        (X, {"bias": np.ones(40, np.int32)}, NotImplementedError, "bias is int32"),
        (X, {"gate": np.ones((2, 40), np.float32)}, ValueError, "gate"),
        (X, {"residual": np.ones((3, 41), np.float32)}, ValueError, "residual"),
        (X, {"row_scale": np.ones(4, np.float32)}, ValueError, "row_scale"),
        (X, {"col_scale": np.ones(40, np.float16)}, ValueError, "col_scale"),
        (X, {"activation": "softplus"}, ValueError, "softplus"),
        (X, {"out_dtype": "f99"}, ValueError, "f99"),
        (X, {"act_scheme": "s9r"}, ValueError, "s9r"),
        (X, {"kernel": "none_such"}, KeyError, "none_such"),
        (X, {"kernel": "linear_any_any_any_ref_baseline"}, KeyError, "the nearest is 'linear_any_any_any__ref_baseline'"),
        (X, {"kernel": "linear_any_any_any__ref_baseline"}, NotImplementedError, "plain.*pack with kernel=linear_any_any_any__ref_baseline$"),
        (X.astype(np.int8), {}, ValueError, "a_scale"),
        (X.astype(np.int8), {"a_scale": np.ones(2, np.float32)}, ValueError, "a_scale"),
        (X.astype(np.int8), {"a_scale": np.ones((3, 2), np.float16)}, ValueError, "a_scale"),
        (X.astype(np.int8), {"a_scale": np.ones((3, 3), np.float32)}, ValueError, "evenly"),
        (X.astype(np.int8), {"a_scale": np.ones(3, np.float32), "a_zero": np.ones(2, np.int32)}, ValueError, "a_zero"),
    ],
)
def test_linear(w, x, options, error, words):
    before = np.array(options["out"]) if "out" in options else None
    with pytest.raises(error, match=words):
        w.linear(x, **options)
    if before is not None:
        assert np.array_equal(before, options["out"], equal_nan=before.dtype.kind == "f")


def test_every_exception_is_nibbles_and_a_builtin(w, tmp_path):
    for call, builtin, code in [
        (lambda: nibble.open(tmp_path / "none"), FileNotFoundError, "not_found"),
        (lambda: nibble.open(tmp_path / "none"), KeyError, "not_found"),
        (lambda: nibble.quantize(X, "u4b8g100"), ValueError, "invalid_argument"),
        (lambda: w.linear(X.astype(np.float64)), NotImplementedError, "unsupported"),
    ]:
        with pytest.raises(nibble.Error) as caught:
            call()
        assert isinstance(caught.value, builtin) and caught.value.code == code
        assert str(caught.value) and not str(caught.value).startswith("'")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(nibble.CorruptData, match="model.safetensors"):
        nibble.open(tmp_path)


@pytest.mark.parametrize(
    "scheme, fields, words",
    [
        ("u4zg128", {"zeros": None}, "zeros"),
        ("u4b8g128", {}, "zero"),
        ("u4zg64", {}, "scales"),
        ("u4zg128", {"codes": np.full((8, 256), 16, np.uint8)}, "16"),
        ("u4zg128", {"codes": np.zeros((8, 256), np.int32)}, "s32"),
        ("u4zg128", {"codes": np.zeros(256, np.uint8)}, "1 dimensions"),
        ("u4zg128", {"codes": np.zeros((0, 256), np.uint8)}, "0"),
        ("u4zg128", {"g_idx": np.full(256, 7)}, "g_idx"),
        ("u4zg128", {"g_idx": np.zeros(256)}, "f64"),
        ("u4zg128", {"g_idx": np.full(256, 2**40)}, "g_idx"),
        ("u4zg128", {"bias": np.zeros(9, np.float32)}, "bias"),
        ("u4zg128", {"prescale": np.zeros(9, np.float32)}, "prescale"),
        ("nonsense", {}, "nonsense"),
        ("s8r_u4zg128", {}, "pack"),
    ],
)
def test_quant_tensor(scheme, fields, words):
    good = {"codes": np.zeros((8, 256), np.uint8), "scales": np.ones((8, 2), np.float16), "zeros": np.zeros((8, 2), np.uint8)}
    assert nibble.QuantTensor("u4zg128", **good)
    with pytest.raises(nibble.Error, match=words):
        nibble.QuantTensor(scheme, **{**good, **fields})


def test_quantize(w):
    with pytest.raises(NotImplementedError, match=r"w is float64, .*w\.astype"):
        nibble.quantize(np.ones((8, 128)))
    with pytest.raises(ValueError, match="NaN|nan"):
        nibble.quantize(np.full((8, 128), np.nan, np.float32))
    with pytest.raises(ValueError, match="rank 1"):
        nibble.quantize(np.ones(128, np.float32))
    with pytest.raises(nibble.Error):
        nibble.quantize(np.ones((8, 128), np.float32), "u4fg32")
    with pytest.raises(nibble.Error, match="CUDA|GPU|device"):
        if nibble.doctor()["gpu"] is not None:
            raise nibble.Unsupported("there is a GPU")
        nibble.pack(w.unpack(), backend="cuda")
    with pytest.raises(ValueError, match="tpu"):
        nibble.pack(w.unpack(), backend="tpu")
    with pytest.raises(KeyError, match="none_such"):
        nibble.pack(w.unpack(), layout="none_such")


def test_quantize_activations():
    for scheme, options, words in [
        ("s8t", {}, "scale="),
        ("s8t", {"scale": 0.0}, "positive"),
        ("s8zt", {"scale": 1.0, "zero": 300}, "300"),
        ("s8ot", {"scale": 1.0}, "no float offset"),
        ("e4m3zr", {}, "zero"),
        ("u4r", {}, "u4"),
        ("s8r", {"codes": np.empty((3, 255), np.int8)}, "codes"),
        ("s8r", {"scales": np.empty(2, np.float32)}, "scales"),
        ("s8r", {"prescale": np.ones(255, np.float32)}, "prescale"),
    ]:
        with pytest.raises(nibble.Error, match=words):
            nibble.quantize_activations(X, scheme, **options)


def test_read_tensors():
    with pytest.raises(nibble.NotFound, match="qweight"):
        nibble.read_tensors({"qweight": X})
    with pytest.raises(nibble.CorruptData, match="JSON"):
        nibble.read_tensors({"qweight": X}, "{")
    with pytest.raises(nibble.InvalidArgument, match="stride"):
        nibble.read_tensors({"qweight": np.zeros((64, 2), np.int32)[::2]})
    with pytest.raises(TypeError, match="qweight"):
        nibble.read_tensors({"qweight": object()})
    with pytest.raises(nibble.CorruptData, match=r"bias is f32 \[3\], but its weight is W\[N,K\] = \[64,2\].*f32 \[64\].*transposed"):
        nibble.read_tensors({"weight": np.zeros((64, 2), np.float32), "bias": np.zeros(3, np.float32)})
