"""Golden checkpoints, as files and as tensors in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from conftest import GOLDEN

import nibble

CHECKPOINTS = sorted(str(p.parent.relative_to(GOLDEN)) for p in GOLDEN.glob("*/*/config.json"))


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_golden(path):
    checkpoint = nibble.open(GOLDEN / path)
    (layer,) = checkpoint.layers
    q = checkpoint.read(layer.name)
    assert (q.n, q.k) == (layer.n, layer.k) and checkpoint.read(layer) == q
    expected = nibble.open(GOLDEN / f"{path}.expected.safetensors").tensor(f"{layer.name}.f32")
    w = nibble.pack(q).dequantize()
    assert np.array_equal(w, expected, equal_nan=True)
    tensors = {name.rpartition(".")[2]: (checkpoint.tensor(name), checkpoint.dtype(name)) for name in checkpoint.tensors}
    assert nibble.read_tensors(tensors, checkpoint.config) == q
    inner = json.loads(checkpoint.config).get("quantization_config")
    assert nibble.read_tensors(tensors, inner) == q


def test_modules_and_missing_names():
    checkpoint = nibble.open(GOLDEN / "awq" / "g128")
    (module,) = checkpoint.modules
    assert module.format == "awq" and module.scheme == module.claimed == "u4zg128" and module.quantized and module.has_bias
    assert "model.proj" in repr(module) and f"{module.name}.qweight" in checkpoint.tensors
    with pytest.raises(nibble.NotFound, match="nowhere"):
        checkpoint.read("nowhere")
    with pytest.raises(KeyError, match="nowhere"):
        checkpoint.tensor("nowhere")


def test_tensors_in_memory_have_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    checkpoint = nibble.open(GOLDEN / "fp8" / "blocks_ragged")
    tensors = {name.rpartition(".")[2]: checkpoint.tensor(name) for name in checkpoint.tensors}
    assert tensors["weight"].dtype == ml_dtypes.float8_e4m3fn
    assert nibble.read_tensors(tensors, checkpoint.config) == checkpoint.read(checkpoint.layers[0])
    with pytest.raises(nibble.InvalidArgument, match="8 bits"):
        nibble.read_tensors({**tensors, "weight": (tensors["weight"], "f16")})


def test_views_outlive_their_checkpoint():
    scales = nibble.open(GOLDEN / "awq" / "g64_bf16").tensor("model.proj.scales")
    assert scales.dtype.itemsize == 2 and not scales.flags.writeable and scales.view(np.uint16).any()


@pytest.fixture
def float_model(tmp_path, rng):
    """Two layers and a head, as a checkpoint directory; written by hand, for nothing else writes safetensors here."""
    weights = {f"model.layers.0.{name}.weight": rng.standard_normal((64, 128), dtype=np.float32) for name in ("up", "down")}
    weights["lm_head.weight"] = rng.standard_normal((32, 128), dtype=np.float32)
    header, data = {}, b""
    for name, w in weights.items():
        header[name] = {"dtype": "F32", "shape": w.shape, "data_offsets": [len(data), len(data) + w.nbytes]}
        data += w.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (tmp_path / "in" / "config.json").write_text("{}")
    return tmp_path / "in", weights


@pytest.mark.parametrize("scheme, format", [("u4zg64", "compressed-tensors"), ("s8r_s8c", "int-quantized"), ("e4m3r_e4m3c", "float-quantized")])
def test_whole_checkpoints(float_model, tmp_path, scheme, format):
    source, weights = float_model
    seen = []
    report = nibble.quantize_checkpoint(source, tmp_path / "q", scheme, progress=lambda done, total, what: seen.append((done, total, what)))
    assert sorted(m.name for m in report.modules) == ["model.layers.0.down", "model.layers.0.up"]
    assert report.bytes_out < report.bytes_in and seen and all(done <= total for done, total, _ in seen)
    checkpoint = nibble.open(tmp_path / "q")
    weight_scheme = scheme.rpartition("_")[2]
    for module in report.modules:
        layer = next(each for each in checkpoint.layers if each.name == module.name)
        assert layer.format == format and layer.scheme == weight_scheme == module.scheme.rpartition("_")[2]
        w = weights[f"{module.name}.weight"]
        assert checkpoint.read(layer).codes.tolist() == nibble.quantize(w, weight_scheme, scale="f16" if "_" not in scheme else "f32").codes.tolist()
        assert module.error.sqnr_db == pytest.approx(nibble.quantization_error(w, checkpoint.read(layer)).sqnr_db)
    nibble.dequantize_checkpoint(tmp_path / "q", tmp_path / "f", "f32")
    back = nibble.open(tmp_path / "f")
    assert np.array_equal(back.tensor(f"{module.name}.weight"), nibble.pack(checkpoint.read(module.name)).dequantize())
    if format == "compressed-tensors":
        assert len(nibble.convert_checkpoint(tmp_path / "q", tmp_path / "awq", "awq").modules) == 2
        assert np.array_equal(nibble.open(tmp_path / "awq").read(module.name).codes, checkpoint.read(module.name).codes)


def test_whole_checkpoints_that_are_refused(float_model, tmp_path):
    source, _ = float_model
    out = tmp_path / "out"
    with pytest.raises(nibble.NotFound):
        nibble.quantize_checkpoint(tmp_path / "none", out)
    with pytest.raises(nibble.InvalidArgument, match="u4q"):
        nibble.quantize_checkpoint(source, out, "u4q")
    with pytest.raises(nibble.Unsupported, match="u4og64"):
        nibble.quantize_checkpoint(source, out, "u4og64")
    with pytest.raises(nibble.Error, match="gguf"):
        nibble.quantize_checkpoint(source, out, format="gguf")

    def stop(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nibble.quantize_checkpoint(source, out, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]  # nothing was left
    nibble.quantize_checkpoint(source, out, skip="down")
    assert [layer.name for layer in nibble.open(out).layers] == ["model.layers.0.up"]
    with pytest.raises(nibble.AlreadyExists):
        nibble.quantize_checkpoint(source, out)
    nibble.quantize_checkpoint(source, out, overwrite=True)
    assert len(nibble.open(out).layers) == 2
    planned = nibble.quantize_checkpoint(source, tmp_path / "planned", only="up|lm_head", all=True, dry_run=True)
    assert sorted(m.name for m in planned.modules) == ["lm_head", "model.layers.0.up"]
    assert not (tmp_path / "planned").exists()
