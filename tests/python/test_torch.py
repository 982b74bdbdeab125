"""nibble.torch: operators, modules and the conversion of models. Skipped without PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import GOLDEN, act_ordered, distance

import nibble

torch = pytest.importorskip("torch")
nt = pytest.importorskip("nibble.torch")
nn = torch.nn
ops = torch.ops.nibble


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.lm_head, self.odd = nn.Linear(256, 512), nn.Linear(512, 256, bias=False), nn.Linear(256, 32), nn.Linear(100, 8)

    def forward(self, x):
        return self.lm_head(self.down(torch.relu(self.up(x))))


@pytest.fixture
def layer():
    return nt.QuantLinear(act_ordered(np.random.default_rng(0)))


def test_tensors_are_read_in_place_and_answered_in_kind(layer):
    x = torch.randn(2, 3, 256)
    w = layer.dequantize()
    for dtype, tolerance in [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 6e-3)]:
        y = layer.weight.linear(x.to(dtype))
        assert y.dtype == dtype and y.shape == (2, 3, 32)
        assert distance(y.float(), (x.to(dtype).float() @ w.T + torch.tensor(layer.weight.unpack().bias))) < tolerance
    out = torch.empty(2, 3, 32)
    assert layer.weight.linear(x, out=out) is out
    assert torch.equal(out, layer.weight.linear(torch.nn.Parameter(x)))
    codes, scales, _ = nibble.quantize_activations(x, "e4m3r")
    assert codes.dtype == torch.float8_e4m3fn
    y = layer.weight.linear(codes, a_scale=scales, out_dtype=torch.bfloat16)
    assert y.dtype == torch.bfloat16 and distance(y.float(), layer(codes.float() * scales[..., None])) < 6e-3


@pytest.mark.parametrize("x", [torch.ones(3, 256, device="meta"), torch.ones(3, 256).to_sparse(), torch.ones(3, 256, dtype=torch.cfloat)])
def test_strange_tensors(layer, x):
    with pytest.raises((nibble.Error, TypeError)):
        layer.weight.linear(x)


def test_a_freed_tensor(layer):
    x = torch.ones(3, 256)
    x.untyped_storage().resize_(0)
    with pytest.raises(nibble.InvalidArgument, match="freed"):
        layer.weight.linear(x)
    with pytest.raises(nibble.InvalidArgument, match="freed"):
        layer.weight.linear(torch.ones(3, 256), residual=x)
    with pytest.raises(nibble.InvalidArgument, match="freed"):
        nibble.read_tensors({"qweight": x})
    with pytest.raises(nibble.InvalidArgument, match="freed"):
        nibble.QuantTensor("u8b128c", x, x)


def test_operators_pass_torchs_own_checks(layer):
    x, packed = torch.randn(3, 256), layer.packed
    bias = torch.randn(32)
    torch.library.opcheck(ops.linear, (x, packed, 32))
    torch.library.opcheck(ops.linear, (x.requires_grad_(), packed, 32, bias, "none", None))
    torch.library.opcheck(ops.linear, (x.detach(), packed, 32, bias, "silu", torch.float16))
    torch.library.opcheck(ops.dequantize, (packed, 32, 256, torch.float16))
    for scheme in ("s8r", "s8zr", "s8og64", "s8zg64", "e4m3g64"):
        torch.library.opcheck(ops.quantize_activations, (x.detach(), scheme))
    codes, scales, _ = ops.quantize_activations(x.detach(), "s8r")
    torch.library.opcheck(ops.scaled_linear, (codes, scales, None, packed, 32, bias))


@pytest.mark.skipif(not hasattr(torch.library, "register_vmap"), reason="PyTorch 2.5 and later")
def test_vmap_makes_rows_of_its_dimension(layer):
    x = torch.randn(2, 3, 5, 256)
    y = layer(x)
    assert torch.equal(torch.vmap(layer)(x), y)
    assert torch.equal(torch.vmap(layer, in_dims=1, out_dims=1)(x), y)
    assert torch.equal(torch.vmap(torch.vmap(torch.vmap(layer)))(x), y)
    assert torch.equal(torch.vmap(layer, in_dims=4)(x.permute(0, 2, 3, 1).unsqueeze(0)), layer(x.permute(1, 0, 2, 3).unsqueeze(1)))
    w = layer.dequantize()
    each = torch.vmap(torch.func.grad(lambda row: layer(row).sum()))
    assert torch.allclose(each(x[0, 0]), w.sum(0).expand(5, 256), atol=1e-4)
    with pytest.raises(NotImplementedError, match="over weight of nibble::linear.*batch x"):
        torch.vmap(lambda packed: ops.linear(x, packed, 32))(torch.stack([layer.packed, layer.packed]))
    fused = nt.FusedLinear({"o": layer.weight.unpack()})
    residual = torch.randn(2, 3, 5, 32)
    y = fused(x, residual)
    assert torch.equal(torch.vmap(fused)(x, residual), y)
    assert torch.equal(torch.vmap(fused, in_dims=(None, 0))(x[0], residual), fused(x[:1].expand_as(x), residual))
    conv = nt.QuantConv2d(nibble.quantize_conv(np.ones((12, 8, 3, 3), np.float32), "u4b8g8"), padding=1)
    images = torch.randn(2, 3, 8, 6, 5)
    assert torch.equal(torch.vmap(conv)(images), torch.stack([conv(batch) for batch in images]))


def test_gradients_of_a_vector(layer):
    x, bias = torch.randn(256, requires_grad=True), torch.randn(32, requires_grad=True)
    ops.linear(x, layer.packed, 32, bias).sum().backward()
    assert torch.allclose(x.grad, layer.dequantize().sum(0), atol=1e-4) and torch.equal(bias.grad, torch.ones(32))
    fused = nt.FusedLinear({"o": layer.weight.unpack()})
    assert torch.allclose(torch.autograd.grad(fused(x).sum(), x)[0], x.grad, atol=1e-4)


def test_transforms_of_gradients(layer):
    w, x, f = layer.dequantize(), torch.randn(256), torch.func
    cubes = (lambda v: (layer(v) ** 3).sum(), lambda v: ((v @ w.T + layer.bias) ** 3).sum())
    for transform in (f.grad, f.jacrev, lambda g: f.jacrev(f.jacrev(g)), lambda g: f.grad(lambda v: (f.grad(g)(v) ** 2).sum())):
        result, expected = (transform(g)(x) for g in cubes)
        assert distance(result, expected) < 1e-5


def test_forward_mode_derivatives_are_refused(layer):
    x = torch.randn(3, 256)
    for call in (lambda: torch.func.jvp(layer, (x,), (x,)), lambda: torch.func.jacfwd(layer)(x[0])):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative.*vjp or jacrev.*dequantize"):
            call()
    forward = torch.autograd.forward_ad
    with forward.dual_level():
        with pytest.raises(NotImplementedError, match="nibble::linear has no forward-mode derivative"):
            layer(forward.make_dual(x, x))
        assert torch.equal(layer(x), layer.weight.linear(x))


def test_the_accumulation_of_a_layer():
    q = nibble.quantize(np.random.default_rng(0).standard_normal((8, 256), dtype=np.float32), "e4m3c")
    layer, other = nt.QuantLinear(q, act_scheme="e4m3r", accumulation="precise"), nt.QuantLinear(q)
    other.load_state_dict(layer.state_dict())
    for same in (layer, other, copy.deepcopy(layer)):
        assert (same.weight.act_scheme, same.weight.accumulation) == ("e4m3r", "precise")
    model = Mlp()
    assert nt.convert(model, "e4m3r_e4m3c", accumulation="precise") == ["up", "down", "odd"]
    assert {layer.weight.accumulation for layer in (model.up, model.down, model.odd)} == {"precise"}


def test_a_weight_is_a_tensor(layer):
    w = layer.weight
    packed = nt.to_tensor(w)
    assert packed.dtype == torch.uint8 and torch.equal(packed, layer.packed) and nt.from_tensor(packed).unpack() == w.unpack()
    x = torch.randn(3, 256)
    assert torch.equal(ops.linear(x, packed, 32), layer(x))
    again = nibble.PackedWeight.from_bytes(w.header(), torch.tensor(w.bytes).numpy())  # PyTorch's memory is aligned
    assert again.unpack() == w.unpack() and (again.layout, again.m_max) == (w.layout, w.m_max)
    with torch.inference_mode():
        assert torch.equal(ops.linear(x, packed.clone(), 32), layer(x))


def test_tensors_that_are_no_weights(layer):
    x, packed = torch.randn(3, 256), layer.packed
    damaged = packed.clone()
    damaged[0] = 0
    for bad, error, words in [
        (damaged, nibble.CorruptData, "NIBBLE01"),
        (packed[:10], nibble.CorruptData, "NIBBLE01"),
        (packed[:-1].clone(), nibble.CorruptData, "bytes, W"),
        (packed.float(), nibble.InvalidArgument, "torch.float32"),
    ]:
        with pytest.raises(error, match=words):
            ops.linear(x, bad, 32)
        with pytest.raises(error, match=words):
            nt.from_tensor(bad)
    with pytest.raises(nibble.InvalidArgument, match=r"n=31.*W\[32,256\]"):
        ops.linear(x, packed, 31)
    with pytest.raises(nibble.InvalidArgument, match="k=255"):
        ops.dequantize(packed, 32, 255, torch.float32)


def test_a_tensor_anywhere_in_memory(layer):
    x, moved = torch.randn(3, 256), torch.cat([torch.zeros(1, dtype=torch.uint8), layer.packed])[1:]
    assert torch.equal(ops.linear(x, moved, 32), layer(x)) and nt.from_tensor(moved).unpack() == layer.weight.unpack()
    moved[0] = 0
    with pytest.raises(nibble.CorruptData, match="NIBBLE01"):
        ops.linear(x, moved, 32)


def test_every_field_survives_as_bytes():
    rng = np.random.default_rng(2)
    float_scheme = nibble.quantize(rng.standard_normal((24, 96), dtype=np.float32), "e4m3b8x32")
    fields = [
        dict(prescale=rng.random(96, dtype=np.float32) + 0.5, bias=rng.standard_normal(24).astype(np.float16)),
        dict(scale2=0.3, static_acts=(0.25, 0), act_limit=3.5),
        dict(),
    ]
    for changed in fields:
        q = nibble.QuantTensor(**nibble._fields(float_scheme, **changed))
        assert nt.from_tensor(nt.to_tensor(nibble.pack(q))).unpack() == q
    for scheme in ("u4zg32", "u2b2g16", "u8zc", "s8t", "u4og32", "e4m3t"):
        for layout in [layout.name for layout in nibble.layouts()]:
            q = nibble.quantize(rng.standard_normal((40, 96), dtype=np.float32), scheme)
            try:
                w = nibble.pack(q, layout=layout, a_dtype="f16", act_scheme="", m_max=77)
            except nibble.Error:
                continue
            again = nt.from_tensor(nt.to_tensor(w))
            assert again.unpack() == q and (again.layout, again.a_dtype, again.m_max) == (layout, "f16", 77)


def test_what_a_weight_was_packed_for_survives_as_bytes():
    q = nibble.quantize(np.random.default_rng(3).standard_normal((40, 96), dtype=np.float32), "u4zg32")
    w = nibble.pack(q, glu=True, glu_limit=7.0, glu_offset=1.0)
    again = nibble.PackedWeight.from_bytes(w.header(), torch.tensor(w.bytes).numpy())
    assert again.unpack() == q and nibble._spec(again) == nibble._spec(w) and nibble._spec(w)["glu"]


def test_damaged_headers_are_refused_or_harmless(layer):
    header, data = layer.weight.header(), torch.tensor(layer.weight.bytes).numpy()
    refused = 0
    for at in range(0, 400, 3):
        for value in (0, 0x39, 0x7B, 0xFF):
            damaged = header[:at] + bytes([value]) + header[at + 1 :]
            try:
                w = nibble.PackedWeight.from_bytes(damaged, data)
            except (nibble.CorruptData, nibble.Unsupported):
                refused += 1
            else:
                w.unpack(), w.linear(np.ones((2, w.k), np.float32))
    assert refused > 200


def test_contents_that_change_are_seen(layer):
    other = nt.QuantLinear(act_ordered(np.random.default_rng(5)))
    x = torch.randn(3, 256)
    before, wanted = layer(x), other(x)
    assert not torch.equal(before, wanted)
    layer.packed.copy_(other.packed)
    assert torch.equal(layer(x), wanted) and torch.equal(ops.linear(x, layer.packed, 32), wanted)
    layer.packed = nt.QuantLinear(act_ordered(np.random.default_rng(0))).packed
    assert torch.equal(layer(x), before)
    layer.packed.data = other.packed.clone()
    assert torch.equal(layer(x), wanted)
    assert torch.equal(torch.func.functional_call(other, {"packed": nt.QuantLinear(act_ordered(np.random.default_rng(0))).packed}, (x,)), before)


def test_weights_are_forgotten_with_their_tensors(layer):
    gc.collect()
    layer(torch.randn(3, 256))
    before = len(nibble._torch.weights._bound)
    for _ in range(3):
        ops.linear(torch.randn(3, 256), layer.packed.clone(), 32)
    gc.collect()
    assert len(nibble._torch.weights._bound) == before
    kept = nt.from_tensor(layer.packed.clone())
    gc.collect()
    assert kept.unpack() == layer.weight.unpack()


def test_state_dict_is_one_tensor(layer, tmp_path):
    assert list(layer.state_dict()) == ["packed"]
    x = torch.randn(3, 256)
    wanted = layer(x)
    other = lambda: nt.QuantLinear(act_ordered(np.random.default_rng(9)))  # noqa: E731
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    torch.save(layer, tmp_path / "whole.pt")
    for state in (layer.state_dict(), torch.load(tmp_path / "layer.pt", weights_only=True), torch.load(tmp_path / "layer.pt", mmap=True)):
        for assign in (False, True):
            loaded = other()
            loaded.load_state_dict(state, assign=assign)
            assert torch.equal(loaded(x), wanted)
    assert torch.equal(torch.load(tmp_path / "whole.pt", weights_only=False)(x), wanted)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), wanted) and copied.packed.data_ptr() != layer.packed.data_ptr()
    on_meta = other().to("meta")
    assert on_meta.packed.is_meta and "meta" in repr(on_meta)
    with pytest.raises(RuntimeError, match="meta device.*assign=True"):
        on_meta.load_state_dict(layer.state_dict())
    on_meta.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(on_meta(x), wanted)
    loaded = nt.QuantLinear.from_float(nn.Linear(256, 32), "s8r_s8c")  # another scheme of the same sizes
    layer.load_state_dict(loaded.state_dict())
    assert torch.equal(layer(x), loaded(x)) and layer.weight.act_scheme == "s8r"
    with pytest.raises(RuntimeError, match=r"packed: W\[8,256\].*W\[32,256\]"):
        layer.load_state_dict(nt.QuantLinear.from_float(nn.Linear(256, 8)).state_dict())
    with pytest.raises(RuntimeError, match="packed: no packed weight"):
        layer.load_state_dict({"packed": torch.zeros(300, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="(?s)Missing key.*packed.*Unexpected key.*_extra"):
        layer.load_state_dict({"_extra": torch.zeros(1)})
    assert torch.equal(layer(x), loaded(x))


def test_safetensors(layer, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = nn.Sequential(layer, nn.Linear(32, 4)), torch.randn(3, 256)
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    other = nn.Sequential(nt.QuantLinear(act_ordered(np.random.default_rng(9))), nn.Linear(32, 4))
    safetensors.load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other(x), model(x))
    other.load_state_dict(safetensors.load_file(str(tmp_path / "model.safetensors")), assign=True)  # views at any address
    assert torch.equal(other(x), model(x))


def _in_another_process(layer, x):
    return layer(x).detach().numpy()


def test_another_process(layer):
    x = torch.randn(3, 256)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert np.array_equal(pool.apply(_in_another_process, (layer, x)), layer(x).numpy())


def test_moving(layer):
    x = torch.randn(3, 256)
    wanted = layer(x)
    for moved in (layer.double(), layer.half(), layer.type(torch.float32), layer.to("cpu"), layer.share_memory()):
        assert moved.packed.dtype == torch.uint8 and torch.equal(moved(x), wanted)


def test_wrappers(layer):
    """A process of its own group; what they do to buffers is the same for more."""
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x, head = torch.randn(3, 256), nn.Linear(32, 4)
        with torch.no_grad():
            wanted = head(layer(x))
        sharded = fully_shard(nn.Sequential(copy.deepcopy(layer), copy.deepcopy(head)), mesh=init_device_mesh("cpu", (1,)))
        for model in (DistributedDataParallel(nn.Sequential(layer, head)), sharded):
            assert torch.equal(model(x).detach(), wanted)
            model(x).sum().backward()
            assert len([p for p in model.parameters() if p.grad is not None]) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_export(layer):
    model, x = nn.Sequential(nn.LayerNorm(256), layer), torch.randn(4, 256)
    exported = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert torch.equal(loaded.module()(x), model(x)) and "1.packed" in loaded.state_dict


def test_compile(layer):
    model = nn.Sequential(nn.LayerNorm(256), layer, nn.ReLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 256)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
        assert torch.equal(compiled(x[:2]), model(x[:2]))
        layer.packed = nt.QuantLinear(act_ordered(np.random.default_rng(5))).packed
        assert torch.equal(compiled(x), model(x))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    compiled(ours).sum().backward()
    model(theirs).sum().backward()
    assert distance(ours.grad, theirs.grad) < 1e-6


def test_gradients_flow_through(layer):
    x = torch.randn(4, 256, requires_grad=True)
    layer(x).pow(2).sum().backward()
    w = layer.dequantize()
    assert distance(x.grad, 2 * layer(x).detach() @ w) < 1e-5


@pytest.mark.parametrize("scheme, tolerance", [("u8b128g128", 0.01), ("s8r_s8c", 0.02), ("u4zg64", 0.2)])
def test_convert_a_float_model(scheme, tolerance):
    model, x = Mlp().eval(), torch.randn(5, 256)
    with torch.no_grad():
        exact = model(x)
        with warned("odd .*do not divide K=100" if "g" in scheme else None):
            assert nt.convert(model, scheme) == ["up", "down"] + (["odd"] if "g" not in scheme else [])
        assert isinstance(model.lm_head, nn.Linear)  # skipped, and odd where groups do not divide its K
        assert distance(model(x), exact) < tolerance
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = Mlp().eval()
        nt.convert(other, scheme, skip=["lm_head", "odd"])
        other.load_state_dict(torch.load(file), strict="g" in scheme)
        assert torch.equal(other(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize("path", ["awq/g64_bf16", "gptq/v1_4bit_act_order", "gptq/v2_8bit", "compressed-tensors/4bit_asymmetric_group",
                                  "float-quantized/ct_block", "fp8/blocks_ragged"])  # fmt: skip
def test_convert_quantized_layers(path):
    """Layers of other people's classes are known by their tensors."""
    checkpoint = nibble.open(GOLDEN / path)
    (module,) = checkpoint.layers

    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            for name in checkpoint.tensors:
                self.register_buffer(name.rpartition(".")[2], nibble._torch.weights._to_torch(checkpoint.tensor(name)))

    model = nn.Module()
    model.block = nn.Module()
    model.block.proj, model.block.norm = Theirs(), nn.LayerNorm(8)
    model.config = type("Config", (), {"quantization_config": json.loads(checkpoint.config)["quantization_config"]})
    theirs, q = model.block.proj, checkpoint.read(module)
    if "qweight" in dict(theirs.named_buffers()):  # most of it can be told without the config
        theirs.bits, theirs.sym = int(q.scheme[1]), "b" in q.scheme
        if "v2" in path:
            theirs.qzero_format = lambda: 2
        assert nt.read_module(theirs) == q
    assert nt.convert(model) == ["block.proj"]
    assert model.block.proj.weight.unpack() == q


def test_convert_leaves_the_rest():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm1d(8), nn.Embedding(10, 128), nn.MultiheadAttention(128, 4), nn.GRU(8, 8))
    with warned(r"left 4 of 4 .*0 \(a convolution, .*conv=True.*3, 3\.out_proj \(torch.nn.MultiheadAttention .*4 \(GRU"):
        assert nt.convert(model) == []
    model.append(nn.Linear(128, 8)).append(nn.Linear(128, 8))
    with warned("left 4 of 6"):
        assert nt.convert(model, skip=lambda name: name == "5") == ["6"]
    with torch.no_grad():
        model[5].weight[0, 0] = float("nan")
    with pytest.raises(nibble.InvalidArgument, match="^5: .*[0,0]"):
        nt.convert(model)


@contextlib.contextmanager
def warned(words):
    """One warning of these words, or none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    ours = [str(w.message) for w in caught if "nibble.torch" in str(w.message)]
    assert len(ours) == (words is not None) and all(re.search(words, text) for text in ours), ours


def test_every_layer_left_float_is_named():
    model = Mlp()
    with warned(r"left 2 of 4 layers float: up \(u4b8g512: .*K=256\); odd \(u4b8g512: .*K=100\)"):
        converted = nt.convert(model, "u4b8g512")
    assert converted == ["down"] and converted.left["lm_head"] == "skip"
    assert re.search("groups do not divide K=256", converted.left["up"]) and "K=100" in converted.left["odd"]
    with warned(r"left 3 of 3 layers float: 0, 1 \(.*K=256\); 2 \(.*K=100\)"):
        assert nt.convert(nn.Sequential(nn.Linear(256, 8), nn.Linear(256, 8), nn.Linear(100, 8)), "u4b8g512") == []
    with warned("nothing: there is no layer"):
        nt.convert(nn.Sequential(nn.ReLU(), nn.LayerNorm(4), nn.Embedding(4, 4)))
    with warned("nothing: skip takes every layer"):
        assert nt.convert(nn.Sequential(nn.Linear(128, 8)), skip=".") == []
    with warned("torch.float64"):
        assert nt.convert(nn.Sequential(nn.Linear(128, 8)).double()) == []
    with pytest.raises(nibble.InvalidArgument, match="itself a Linear.*QuantLinear.from_float"):
        nt.convert(nn.Linear(128, 8))
    with pytest.raises(nibble.InvalidArgument, match="^0: .*meta"):
        nt.convert(nn.Sequential(nn.Linear(128, 8, device="meta")))

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 128, 64))

    with warned(r"1 \(Experts is no layer that nibble has"):
        assert nt.convert(nn.Sequential(nn.Linear(128, 8), Experts())) == ["0"]
    shared = nn.Linear(128, 8)
    model = nn.Sequential(shared, nn.Sequential(shared))
    with warned(None):
        assert nt.convert(model) == ["0"]
    assert model[0] is model[1][0] and isinstance(model[0], nt.QuantLinear)


@pytest.mark.parametrize(
    "skip, left",
    [
        (r"layers\.0", {"layers.0.gate", "layers.0.gate_proj"}),
        (re.compile("gate$"), {"layers.0.gate", "layers.1.gate"}),
        (lambda name: name.endswith("_proj"), {"layers.0.gate_proj", "layers.1.gate_proj"}),
        (["gate", "head"], {"layers.0.gate", "layers.1.gate", "head"}),  # whole parts of names
        (["layers.0", re.compile("1.*proj"), lambda name: name == "head"], {"layers.0.gate", "layers.0.gate_proj", "layers.1.gate_proj", "head"}),
        ((), set()),
        (None, set()),
    ],
)
def test_skip(skip, left):
    model = nn.Module()
    model.layers, model.head = nn.ModuleList(), nn.Linear(128, 8)
    for _ in range(2):
        model.layers.append(nn.ModuleDict({"gate": nn.Linear(128, 8), "gate_proj": nn.Linear(128, 8)}))
    with warned(None):
        converted = nt.convert(model, skip=skip)
    assert set(converted.left) == left and len(converted) + len(left) == 5


def test_skip_that_is_mistaken():
    model = nn.Sequential(nn.Linear(128, 8))
    with warned("skip takes no layer by 'lm_heed'"):
        assert nt.convert(model, skip=["lm_heed"]) == ["0"]
    for skip, error in [("(", nibble.InvalidArgument), ([1], TypeError), (7, TypeError)]:
        with pytest.raises(error, match="skip|iterable"):
            nt.convert(nn.Sequential(nn.Linear(128, 8)), skip=skip)


def test_what_models_ask_of_a_linear_layer():
    linear = nn.Linear(256, 32, dtype=torch.bfloat16)
    layer = nt.QuantLinear.from_float(linear, "s8r_s8c")
    for name in ("in_features", "out_features"):
        assert getattr(layer, name) == getattr(linear, name)
    for mine, theirs in [(layer.weight, linear.weight), (layer.bias, linear.bias)]:
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype and mine.device == theirs.device
    assert torch.equal(layer.bias, linear.bias) and layer.weight.scheme == "s8c"
    assert isinstance(layer.weight.shape, torch.Size) and not list(layer.parameters())
    text = "in_features=256, out_features=32, bias=True, scheme=s8r_s8c, dtype=torch.bfloat16, device=cpu"
    assert repr(layer).startswith(f"QuantLinear({text}")
    assert layer.half().weight.dtype == layer.bias.dtype == torch.float16
    assert nt.QuantLinear.from_float(nn.Linear(256, 32, bias=False)).bias is None
    assert layer(torch.randn(2, 256, dtype=layer.weight.dtype)).dtype == torch.float16
    conv = nt.QuantConv2d.from_float(nn.Conv2d(8, 12, 3, groups=2), "u8b128c")
    assert (conv.in_channels, conv.out_channels, conv.kernel_size) == (8, 12, (3, 3)) and conv.bias.shape == (12,)
    assert "QuantConv2d(8, 12, kernel_size=(3, 3)" in repr(conv)
    with pytest.raises(nibble.InvalidArgument, match="GRU"):
        nt.QuantLinear.from_float(nn.GRU(4, 4))


def test_strides_and_dimensions(layer):
    x = torch.randn(256, 6).T
    assert torch.equal(layer(x), layer(x.contiguous()))
    wide = torch.randn(2, 512)[:, ::2]
    assert torch.equal(layer(wide), layer(wide.contiguous()))
    many = torch.randn(2, 1, 3, 2, 1, 256)
    assert torch.equal(layer(many), layer(many.flatten(0, -2)).unflatten(0, many.shape[:-1]))
    swapped = torch.randn(3, 2, 256, requires_grad=True).transpose(0, 1)
    layer(swapped).sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(swapped), layer(swapped.contiguous()))
    torch.library.opcheck(ops.linear, (x, layer.packed, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(layer, dtype):
    x = torch.randn(4, 256)
    conv = nt.QuantConv2d.from_float(nn.Conv2d(8, 12, 3), "u8b128c")
    image = torch.randn(1, 8, 5, 5)
    with torch.autocast("cpu", dtype):
        assert nn.Linear(256, 4)(x).dtype == layer(x).dtype == conv(image).dtype == dtype
        assert torch.equal(layer(x), layer.weight.linear(x.to(dtype)))
        assert ops.linear(x, layer.packed, 32, None, "none", torch.float32).dtype == torch.float32
        compiled = torch.compile(nn.Sequential(nn.LayerNorm(256), layer), fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            assert compiled(x).dtype == dtype
        grown = x.clone().requires_grad_()
        y = layer(grown)
    assert y.dtype == dtype
    y.float().sum().backward()
    assert grown.grad.dtype == torch.float32 and distance(grown.grad, layer.dequantize().sum(0).expand(4, -1)) < 1e-2
    assert layer(x).dtype == torch.float32


def test_gptq_that_was_converted_to_v2_while_loading():
    checkpoint = nibble.open(GOLDEN / "gptq" / "v1_4bit_asymmetric")
    (module,) = checkpoint.layers
    theirs = nn.Module()
    for name in checkpoint.tensors:
        theirs.register_buffer(name.rpartition(".")[2], nibble._torch.weights._to_torch(checkpoint.tensor(name)))
    theirs.qzeros = theirs.qzeros + 0x11111111
    theirs.qzero_format = lambda: 2
    config = json.loads(checkpoint.config)["quantization_config"]
    assert np.array_equal(nt.read_module(theirs, config).zeros, checkpoint.read(module).zeros)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(16, 32, (3, 2), stride=2, padding="valid", bias=False), nn.ReLU(),
                                   nn.Conv2d(32, 32, (2, 3), padding="same", dilation=(3, 2), groups=4))  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(torch.relu(self.block(torch.relu(self.stem(x)))).mean((2, 3)))


@pytest.mark.parametrize("scheme, tolerance", [("u8b128c", 0.02), ("s8r_s8c", 0.04), ("u8b128g48", 0.02)])
def test_convert_convolutions(scheme, tolerance):
    model, x = Cnn().eval(), torch.randn(2, 3, 12, 14)
    with torch.no_grad():
        exact = model(x)
        with warned("stem .*K=27.*head .*K=32" if "g48" in scheme else None):
            names = nt.convert(model, scheme, conv=True)
        # 27 inputs of the stem and 32 of the head are not divided by 48.
        assert names == (["block.0", "block.2"] if "g48" in scheme else ["stem", "block.0", "block.2", "head"])
        assert distance(model(x), exact) < tolerance
        assert distance(model(x.contiguous(memory_format=torch.channels_last)), exact) < tolerance
        image = torch.randn(16, 12, 14)
        assert torch.equal(model.block(image), model.block(image[None])[0])
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = Cnn().eval()
        nt.convert(other, scheme, conv=True, skip=[name for name in ("stem", "head") if name not in names])
        other.load_state_dict(torch.load(file))
        assert torch.equal(other(x), model(x))
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        with warned("left [34] of 4 .*convolution"):
            assert nt.convert(Cnn(), scheme) == names[-1:] * ("head" in names)


def test_convolutions_that_are_refused():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"))
    with pytest.raises(nibble.Unsupported, match="^0: padding_mode is 'reflect'"):
        nt.convert(model, "u8b128c", conv=True)
    with warned("nothing: skip"):
        assert nt.convert(model, "u8b128c", conv=True, skip="^0$") == []


@pytest.fixture
def conv():
    module = nn.Conv2d(8, 12, 3, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    return nt.QuantConv2d.from_float(module, "u8b128c")


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_convolution_operator(conv, memory_format):
    x = torch.randn(2, 8, 7, 9).to(memory_format=memory_format)
    w = conv.dequantize().unflatten(1, (3, 3, 4)).permute(0, 3, 1, 2)
    bias = torch.tensor(conv.weight.unpack().bias)
    exact = torch.nn.functional.conv2d(x, w, bias, (2, 1), (1, 2), (1, 2), 2)
    y = conv(x)
    assert distance(y, exact) < 1e-6 and y.is_contiguous(memory_format=memory_format)
    torch.compiler.reset()  # there is a limit on what is compiled
    arguments = (conv.packed, 12, conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups)
    torch.library.opcheck(ops.conv2d, (x, *arguments))
    torch.library.opcheck(ops.conv2d, (x.clone().requires_grad_(), *arguments, torch.randn(12)))
    torch.library.opcheck(ops.conv2d, (x, *arguments, None, "silu", torch.float16))
    compiled = torch.compile(nn.Sequential(conv, nn.ReLU()), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.relu(y))
        assert torch.equal(compiled(x[:1]), torch.relu(y[:1]))
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    conv(ours).pow(2).sum().backward()
    torch.nn.functional.conv2d(theirs, w, bias, (2, 1), (1, 2), (1, 2), 2).pow(2).sum().backward()
    assert distance(ours.grad, theirs.grad) < 1e-5


def test_converts_the_head_by_a_scheme_of_its_own():
    model = Mlp()
    with pytest.warns(UserWarning, match="odd"):
        converted = nt.convert(model, "u4b8g64", head="u8b128g64")
    assert converted == ["lm_head", "up", "down"] and "lm_head" not in converted.left
    assert model.lm_head.weight.scheme == "u8b128g64" and model.up.weight.scheme == "u4b8g64"
    with pytest.raises(nibble.InvalidArgument, match="lm_head is no layer to quantize: it is QuantLinear"):
        nt.convert(model, "u4b8g64", head="u8b128g64")
    with pytest.raises(nibble.NotFound, match="Sequential has none"):
        nt.convert(nn.Sequential(nn.Linear(64, 64)), "u4b8g64", head="u8b128g64")
    with pytest.raises(nibble.InvalidArgument, match="its groups do not divide K=256"):
        nt.convert(Mlp(), "u4b8g64", head="u8b128g96")


THREADS = """
import os
import pathlib
import torch
torch.set_num_threads(2)
before = torch.ones(1 << 20).add(1)  # PyTorch has its threads now
started = len(os.listdir("/proc/self/task"))
import nibble, nibble.torch
layer = nibble.torch.QuantLinear(nibble.quantize(torch.randn(512, 1024).numpy(), "u4b8g128"))
quantized = len(os.listdir("/proc/self/task"))
x = torch.randn(3, 1024)
y = layer(x)
two = nibble.doctor()["threads"]
more = len(os.listdir("/proc/self/task")) - quantized
torch.set_num_threads(1)
one = nibble.doctor()["threads"]
assert torch.equal(layer(x), y)
torch.set_num_threads(2)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(layer(x), y) else 1)
print(two, one, more, os.waitpid(child, 0)[1])
"""


INTEL_OPENMP = pathlib.Path(sys.prefix, "lib", "libiomp5.so")  # of the package intel-openmp


def run_on_threads(**variables):
    env = {key: value for key, value in os.environ.items() if key != "NIBBLE_NUM_THREADS"} | variables
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, check=True, capture_output=True, text=True, timeout=100)
    return list(map(int, done.stdout.split()))


@pytest.mark.skipif(not torch.backends.openmp.is_available() or not os.path.isdir("/proc/self/task"), reason="needs PyTorch with OpenMP, and /proc")
def test_runs_on_the_threads_of_pytorch():
    assert run_on_threads() == [2, 1, 0, 0]  # as many as PyTorch, no others; and a child process does not wait for threads that it has not
    assert run_on_threads(NIBBLE_NUM_THREADS="3")[:2] == [3, 3]


@pytest.mark.skipif(not INTEL_OPENMP.exists(), reason="needs the package intel-openmp")
def test_runs_on_the_threads_of_a_preloaded_library():
    """PyTorch's operators run on them then, whatever library PyTorch is linked with."""
    assert run_on_threads(LD_PRELOAD=str(INTEL_OPENMP)) == [2, 1, 0, 0]
