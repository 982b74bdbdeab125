"""The Python programs of README and docs/: render.py quotes them from here. Each runs where a small model lies under the names they use."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from conftest import distance

import nibble

try:
    import torch

    import nibble.torch
except ImportError:
    torch = None
needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch")
SIZES = {"self_attn.q_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}


def write_safetensors(path, tensors: dict[str, np.ndarray]) -> None:
    header, data = {}, b""
    for name, w in tensors.items():
        header[name] = {"dtype": "F32", "shape": w.shape, "data_offsets": [len(data), len(data) + w.nbytes]}
        data += w.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch, rng):
    """Llama-3-8B and Llama-3-8B-AWQ in the working directory: a layer of them, smaller."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Llama-3-8B").mkdir()
    layer = "model.layers.0."
    tensors = {f"{layer}{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in SIZES.items()}
    tensors |= {f"{layer}{name}.weight": np.ones(256, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    write_safetensors(tmp_path / "Llama-3-8B" / "model.safetensors", tensors)
    (tmp_path / "Llama-3-8B" / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    absmax = {f"{layer}{name}.input_absmax": np.linspace(1, 9, k, dtype=np.float32) for name, (_, k) in SIZES.items()}
    write_safetensors(tmp_path / "acts.safetensors", absmax)
    nibble.quantize_checkpoint("Llama-3-8B", "Llama-3-8B-AWQ", "u4zg128", format="awq")


@pytest.fixture
def x(rng):
    return rng.standard_normal((4, 512), dtype=np.float32)


@needs_torch
def test_readme(x):
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 512)).eval()
    exact = model(torch.tensor(x))
    # docs: begin readme
    import nibble  # pip install .  (no CUDA and no PyTorch needed)

    w = nibble.pack(nibble.open("Llama-3-8B-AWQ").read("model.layers.0.mlp.down_proj"))
    y = w.linear(x)  # arrays of NumPy, PyTorch, JAX, CuPy, read where they are

    import nibble.torch

    nibble.torch.convert(model, "u4b8g128")  # a PyTorch model in place; then torch.compile it
    # docs: end readme
    assert distance(y, x @ w.dequantize().T) < 1e-5
    assert all(isinstance(model[i], nibble.torch.QuantLinear) for i in (0, 2))
    assert distance(model(torch.tensor(x)).detach(), exact.detach()) < 0.2


def test_a_layer(x, capsys):
    up = np.ones((4, 256), np.float32)
    # docs: begin layer
    import nibble

    checkpoint = nibble.open("Llama-3-8B-AWQ")  # AWQ, GPTQ, compressed-tensors, FP8, ...: docs/checkpoints.md
    for layer in checkpoint.layers:
        print(layer.name, layer.format, layer.scheme, layer.n, layer.k, *layer.notes)

    q = checkpoint.read("model.layers.0.mlp.down_proj")  # QuantTensor: q.codes, q.scales, q.zeros, q.g_idx, q.bias, as NumPy arrays
    w = nibble.pack(q)  # once; backend="cuda" for the GPU
    y = w.linear(x)  # y[..., N] = x[..., K] · Wᵀ + bias
    y = w.linear(x, activation="silu", gate=up)  # and the rest of the epilogue
    print(w.explain(m_max=16), nibble.verify(q))  # which kernel and why; is it right?
    # docs: end layer
    exact = x @ w.dequantize().T
    assert distance(y, exact / (1 + np.exp(-exact))) < 1e-5
    assert capsys.readouterr().out.startswith("model.layers.0.self_attn.q_proj awq u4zg128 256 256\n")
    assert nibble.verify(q)


def test_convolutions(rng):
    kernel, x = rng.standard_normal((32, 64, 3, 3), dtype=np.float32), rng.standard_normal((2, 64, 9, 9), dtype=np.float32)
    # docs: begin convolutions
    w = nibble.pack(nibble.quantize_conv(kernel, "u4b8g64"))  # kernel [Co, C/groups, Kh, Kw]
    y = w.conv(x, stride=2, padding=1, activation="relu")  # x [B, C, H, W] → y [B, Co, Oh, Ow]; the epilogue is that of linear
    layer = nibble.Conv(w, stride=2, padding=(0, 1, 0, 1))  # top, bottom, left, right
    # docs: end convolutions
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    patches = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    exact = np.maximum(np.einsum("bchwij,ocij->bohw", patches, kernel), 0)
    assert distance(y, exact) < 0.2 and layer(x).shape == (2, 32, 4, 4)


def test_experts(rng):
    gates, ups = (rng.standard_normal((4, 64, 128), dtype=np.float32) for _ in range(2))
    downs, x, logits = (rng.standard_normal(shape, dtype=np.float32) for shape in ((4, 128, 64), (3, 128), (3, 4)))
    # docs: begin experts
    parts = ([nibble.quantize(w, "u8b128g64") for w in pair] for pair in zip(gates, ups))
    gate_up = nibble.pack_experts(map(nibble.join, parts), glu=True)  # one expert at a time is in memory unpacked
    down = nibble.pack_experts(nibble.quantize(w, "u8b128g64") for w in downs)
    ids, weights = nibble.route(logits, top_k=2)  # softmax over all, normalized over the chosen
    y = nibble.moe(x, ids, weights, gate_up, down, activation="silu")
    # docs: end experts
    # docs: begin grouped
    order = np.argsort(ids, axis=None, kind="stable")  # pairs of a token and an expert of its, sorted by expert
    offsets = np.searchsorted(ids.ravel()[order], np.arange(5)).astype(np.int32)  # of 4 experts
    hidden = nibble.grouped(x, gate_up, offsets=offsets, rows=(order // 2).astype(np.int32), activation="silu")
    results = nibble.grouped(hidden, down, offsets=offsets)  # a row for each pair
    in_place = nibble.grouped(x, gate_up, ids=ids, activation="silu")  # [..., top_k, N], nothing sorted
    by_pair = nibble.grouped(in_place, down, ids=ids)
    # docs: end grouped
    exact = np.zeros_like(y)
    for t, row in enumerate(x):
        for e, weight in zip(ids[t], weights[t]):
            gate = gates[e] @ row
            exact[t] += weight * (downs[e] @ (gate / (1 + np.exp(-gate)) * (ups[e] @ row)))
    assert distance(y, exact) < 0.03
    added = np.zeros_like(y)
    np.add.at(added, order // 2, weights.ravel()[order, None] * results)
    assert distance(added, y) < 1e-5
    assert distance((weights[..., None] * by_pair).sum(1), y) < 1e-5


def test_whole_checkpoints():
    q = nibble.open("Llama-3-8B-AWQ").read("model.layers.0.mlp.down_proj")
    awq = pathlib.Path("Llama-3-8B-AWQ")
    awq.rename("without-search")
    # docs: begin checkpoints
    report = nibble.quantize_checkpoint("Llama-3-8B", "Llama-3-8B-AWQ", "u4zg128", format="awq", clip_search=True)
    nibble.quantize_checkpoint("Llama-3-8B", "Llama-3-8B-W8A8", "s8r_s8c", smooth=0.5, calibration="acts.safetensors")
    nibble.convert_checkpoint("Llama-3-8B-AWQ", "Llama-3-8B-CT", "compressed-tensors")  # lossless, or Unsupported with the layer
    nibble.dequantize_checkpoint("Llama-3-8B-AWQ", "Llama-3-8B-bf16", "bf16")  # bit-exact
    # docs: end checkpoints
    name = "model.layers.0.mlp.down_proj"
    assert awq.is_dir() and len(report.modules) == len(SIZES)
    w = nibble.open("Llama-3-8B").tensor(f"{name}.weight")
    searched = nibble.open("Llama-3-8B-AWQ").read(name)
    assert nibble.quantization_error(w, searched).sqnr_db > nibble.quantization_error(w, q).sqnr_db
    assert np.array_equal(nibble.open("Llama-3-8B-CT").read(name).codes, searched.codes)
    assert nibble.open("Llama-3-8B-W8A8").read(name).scheme == "s8c"
    assert nibble.open("Llama-3-8B-bf16").tensor(f"{name}.weight").shape == (256, 512)


@needs_torch
def test_convert(x):
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 100), torch.nn.Linear(100, 8)).eval()
    inputs = torch.tensor(x)
    exact = model(inputs)
    # docs: begin convert
    import nibble.torch

    names = nibble.torch.convert(model, "u4b8g128")  # the scheme of float layers; quantized layers keep their numbers
    print(names.left)  # layers that stay float, with the reasons
    model = torch.compile(model)
    # docs: end convert
    assert names == ["0", "2"] and [name for name in names.left] == ["3"]
    assert distance(model(inputs).detach(), exact.detach()) < 0.3


@needs_torch
def test_a_tensor_of_torch(x):
    x = torch.tensor(x, dtype=torch.bfloat16)
    # docs: begin tensor
    import nibble

    q = nibble.open("Llama-3-8B-AWQ").read("model.layers.0.mlp.down_proj")
    w = nibble.pack(q, a_dtype=x.dtype)  # on an NVIDIA GPU: backend="cuda"
    y = w.linear(x, activation="silu")  # x is a tensor where the weight is; on a GPU enqueued on PyTorch's current stream
    # docs: end tensor
    exact = x.float() @ torch.tensor(w.dequantize()).T
    assert w.a_dtype == "bf16" and y.dtype == x.dtype
    assert distance(y.float(), torch.nn.functional.silu(exact)) < 6e-3


@needs_torch
def test_operators(x):
    x, bias, images = torch.tensor(x), torch.ones(256), torch.randn(2, 64, 9, 9)
    w = nibble.pack(nibble.open("Llama-3-8B-AWQ").read("model.layers.0.mlp.down_proj"))
    filters = nibble.pack(nibble.quantize_conv(np.ones((256, 64, 3, 3), np.float32), "u8b128g64"))
    # docs: begin operators
    packed = nibble.torch.to_tensor(w)  # uint8: a header, and the packed bytes; of a module it is layer.packed
    y = torch.ops.nibble.linear(x, packed, w.n, bias, "silu", torch.bfloat16)
    codes, scales, zeros = torch.ops.nibble.quantize_activations(x, "s8r")
    z = torch.ops.nibble.scaled_linear(codes, scales, None, packed, w.n)
    W = torch.ops.nibble.dequantize(packed, w.n, w.k, torch.float16)
    r = torch.ops.nibble.fused_linear(x, packed, w.n, "none", False, y, torch.ones(w.k), 1e-5)  # of RMSNorm(x), with y added

    convolution = nibble.torch.to_tensor(filters)  # then N and the filter; stride, padding, dilation, groups, bias
    d = torch.ops.nibble.conv2d(images, convolution, 256, [3, 3], [1, 1], [1, 1, 1, 1], [1, 1], 1, bias, "relu", None)
    # docs: end operators
    exact = x @ W.float().T
    assert y.dtype == torch.bfloat16 and distance(y.float(), torch.nn.functional.silu(exact + bias)) < 6e-3
    assert distance(z.float(), exact) < 0.02 and d.shape == (2, 256, 9, 9)
    normed = torch.nn.functional.rms_norm(x, (w.k,), eps=1e-5)
    assert r.dtype == y.dtype and distance(r.float(), normed @ W.float().T + y.float()) < 6e-3


@needs_torch
def test_state(x):
    safetensors = pytest.importorskip("safetensors.torch")
    model = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 512))
    inputs = torch.tensor(x)
    nibble.torch.convert(model)
    before = model(inputs)
    # docs: begin state
    safetensors.save_file(model.state_dict(), "model.safetensors")  # or torch.save; keys are "0.packed", "2.packed"
    model.load_state_dict(safetensors.load_file("model.safetensors"))  # the bytes for this machine's kernels: nothing is packed
    # docs: end state
    assert list(model.state_dict()) == ["0.packed", "2.packed"] and torch.equal(model(inputs), before)


def small_llama(directory, quantized=None):
    """A float checkpoint of transformers, and what AWQ might make of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, dtype="float16")).half().save_pretrained(directory)
    if quantized is not None:
        nibble.quantize_checkpoint(directory, quantized, "u4zg128", format="awq")


def converted(directory):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    nibble.torch.convert(model)
    return model


@needs_torch
def test_transformers(tmp_path):
    pytest.importorskip("transformers", minversion="5")
    small_llama("TinyLlama", "TinyLlama-AWQ")
    ids = torch.arange(2, 12)[None]
    # docs: begin transformers
    import nibble.transformers
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("TinyLlama-AWQ")  # or GPTQ, compressed-tensors, FP8
    tokens = model.generate(ids, max_new_tokens=4)
    # docs: end transformers
    plain = model(input_ids=ids).logits
    # docs: begin fuse
    fused = nibble.torch.fuse(model)  # the names of the joined layers; fused.left: what is as it was, and why
    model.save_pretrained("TinyLlama-again")  # as it was read: AWQ, with the layers of the checkpoint
    # docs: end fuse
    assert len(fused) == 4 and not fused.left and distance(model(input_ids=ids).logits.detach().float(), plain.detach().float()) < 2.0**-8
    assert [layer.name for layer in nibble.open("TinyLlama-again").layers] == [layer.name for layer in nibble.open("TinyLlama-AWQ").layers]
    nibble.torch.unfuse(model)
    assert isinstance(model.model.layers[0].mlp.up_proj, nibble.torch.QuantLinear) and tokens.shape[1] > 10
    # docs: begin quantizing
    config = nibble.transformers.NibbleConfig("u4zg128", skip=["lm_head", "layers.0.mlp.down_proj"])
    model = AutoModelForCausalLM.from_pretrained("TinyLlama", quantization_config=config)
    model.save_pretrained("TinyLlama-W4A16")  # compressed-tensors, which loads again here and elsewhere
    # docs: end quantizing
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)
    assert "compressed-tensors" in {layer.format for layer in nibble.open("TinyLlama-W4A16").layers}


@needs_torch
def test_lora(tmp_path):
    pytest.importorskip("peft")
    pytest.importorskip("transformers", minversion="5")
    small_llama("float")
    model = converted("float")
    # docs: begin lora
    import nibble.peft
    from peft import LoraConfig, get_peft_model

    config = nibble.peft.register(LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    model = get_peft_model(model, config)  # the adapters are trained, the quantized weights stay
    # docs: end lora
    model(input_ids=torch.arange(2, 12)[None], labels=torch.arange(2, 12)[None]).loss.backward()
    grown = [name for name, p in model.named_parameters() if p.grad is not None]
    assert len(grown) == 4 and all("lora" in name for name in grown)


@needs_torch
def test_tensor_parallel(x):
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    checkpoint = nibble.open("Llama-3-8B-AWQ")
    x = torch.tensor(x[:, :256])
    try:
        # docs: begin parallel
        down = nibble.torch.RowParallelLinear(checkpoint.read("model.layers.0.mlp.down_proj"), input_is_parallel=True)
        up = nibble.torch.ColumnParallelLinear(checkpoint.read("model.layers.0.mlp.up_proj"), channels=down.channels, activation="silu")
        y = down(up(x))
        # docs: end parallel
    finally:
        torch.distributed.destroy_process_group()
    weight = {name: torch.tensor(nibble.pack(checkpoint.read(f"model.layers.0.mlp.{name}")).dequantize()) for name in ("up_proj", "down_proj")}
    assert distance(y, torch.nn.functional.silu(x @ weight["up_proj"].T) @ weight["down_proj"].T) < 1e-5
