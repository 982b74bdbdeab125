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
