"""Files of packed weights."""

from __future__ import annotations

import json
import pathlib
import struct

import numpy as np
import pytest
from conftest import act_ordered

import nibble


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    """A checkpoint of one layer, "up"."""
    w = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    path = tmp_path / "model.safetensors"
    write_float(tmp_path / "float.safetensors", {"up.weight": w})
    nibble.quantize_checkpoint(tmp_path / "float.safetensors", path, "u4zg128", overwrite=True)
    return path


def write_float(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file of f32 tensors."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + tensor.nbytes]}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_weight_comes_back(tmp_path, rng):
    q = act_ordered(rng)
    w = nibble.pack(q, m_max=32, act_scheme="s8r")
    nibble.save_packed(tmp_path / "w.nibble", {"a": w, "b": nibble.pack(q, layout="plain")})
    file = nibble.PackedFile(tmp_path / "w.nibble")
    assert [m.name for m in file.modules] == ["a", "b"] and file.modules[1].layout == "plain"
    assert file.library_version == nibble.__version__ and file.checkpoint == ""
    assert (file.modules[0].n, file.modules[0].k, file.modules[0].scheme) == (q.n, q.k, q.scheme)
    assert file.modules[0].act_order and file.modules[0].has_bias and file.modules[0].nbytes == w.nbytes
    loaded = file.load("a")
    del file
    assert loaded.unpack() == q
    assert (loaded.m_max, loaded.act_scheme, loaded.layout) == (32, "s8r", w.layout)
    x = rng.standard_normal((3, q.k)).astype(np.float32)
    assert np.array_equal(loaded.linear(x), w.linear(x))


def test_of_a_convolution(tmp_path, rng):
    w = nibble.pack(nibble.quantize_conv(rng.standard_normal((8, 4, 3, 3)).astype(np.float32), "s8c"))
    nibble.save_packed(tmp_path / "w.nibble", {"conv": w})
    x = rng.standard_normal((1, 4, 5, 5)).astype(np.float32)
    assert np.array_equal(nibble.PackedFile(tmp_path / "w.nibble").load("conv").conv(x, padding=1), w.conv(x, padding=1))


def test_a_checkpoint_finds_its_packed_file(model):
    checkpoint = nibble.open(model)
    assert nibble.PackedFile.beside(checkpoint) is None
    # docs: begin packed
    checkpoint = nibble.open(model)
    weights = {layer.name: nibble.pack(checkpoint.read(layer), m_max=512) for layer in checkpoint.layers}  # once
    nibble.save_packed(model.with_suffix(".nibble"), weights, checkpoint=checkpoint)

    file = nibble.PackedFile.beside(checkpoint)  # at every later start
    for layer in checkpoint.layers:
        w, packed_because = nibble.packed_weight(checkpoint, layer, file, m_max=512)
    # docs: end packed
    assert packed_because == "" and file.checkpoint == model.name and file.compare(checkpoint) == {}
    assert w.unpack() == checkpoint.read("up")
    _, why = nibble.packed_weight(checkpoint, "up")
    assert why == "there is no packed file"
    _, why = nibble.packed_weight(checkpoint, "up", file, layout="plain")
    assert "layout" in why

    write_float(model.with_name("float.safetensors"), {"up.weight": np.ones((64, 256), np.float32)})
    nibble.quantize_checkpoint(model.with_name("float.safetensors"), model, "u4zg128", overwrite=True)
    changed = nibble.open(model)
    assert list(file.compare(changed)) == ["up"]
    _, why = nibble.packed_weight(changed, "up", file)
    assert "changed" in why


def test_errors(tmp_path, model, rng):
    w = nibble.pack(act_ordered(rng))
    path = tmp_path / "w.nibble"
    nibble.save_packed(path, {"w": w})
    with pytest.raises(nibble.AlreadyExists, match="w.nibble"):
        nibble.save_packed(path, {"w": w})
    nibble.save_packed(path, {"w": w}, overwrite=True)
    with pytest.raises(nibble.InvalidArgument, match="control"):
        nibble.save_packed(tmp_path / "x", {"a\nb": w})
    with pytest.raises(nibble.NotFound, match='"v"'):
        nibble.PackedFile(path).load("v")
    with pytest.raises(nibble.NotFound):
        nibble.PackedFile(tmp_path / "absent")
    with pytest.raises(nibble.CorruptData, match="nibble pack"):
        nibble.PackedFile(model)
    with pytest.raises(nibble.NotFound, match="down"):
        nibble.packed_weight(nibble.open(model), "down")
