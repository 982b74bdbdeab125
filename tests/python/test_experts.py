"""Layers of experts: values against their definition, routing, and the experts of transformers' models."""

from __future__ import annotations

import copy
import importlib.util
import pathlib
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import distance
from test_documents import write_safetensors

import nibble

E, T, K, I, N, TOP = 5, 7, 64, 32, 48, 2


def layer(rng, scheme="u4zg32"):
    parts = [nibble.quantize(rng.standard_normal((2 * I, K), dtype=np.float32), scheme) for _ in range(E)]
    downs = [nibble.quantize(rng.standard_normal((N, I), dtype=np.float32), scheme) for _ in range(E)]
    return parts, downs, nibble.pack_experts(parts, glu=True), nibble.pack_experts(iter(downs))


def dense(q):
    return nibble.pack(q).dequantize().astype(np.float64)


def expected(x, ids, weights, parts, downs):
    y = np.zeros((len(x), N))
    for t, row in enumerate(x.astype(np.float64)):
        for j, e in enumerate(ids[t]):
            if e >= 0:
                gate, up = np.split(dense(parts[e]) @ row, 2)
                y[t] += weights[t, j] * (dense(downs[e]) @ (gate / (1 + np.exp(-gate)) * up))
    return y


def test_values(rng):
    parts, downs, gate_up, down = layer(rng)
    x = rng.standard_normal((T, K), dtype=np.float32)
    ids, weights = nibble.route(rng.standard_normal((T, E), dtype=np.float32), TOP)
    assert ids.dtype == np.int32 and weights.dtype == np.float32 and np.allclose(weights.sum(1), 1)
    wanted = expected(x, ids, weights, parts, downs)
    y = nibble.moe(x, ids, weights, gate_up, down)
    assert y.shape == (T, N) and distance(y, wanted) < 1e-5
    residual = rng.standard_normal((T, N), dtype=np.float32)
    assert distance(nibble.moe(x, ids, weights, gate_up, down, residual=residual), wanted + residual) < 1e-5
    assert distance(nibble.moe(x.astype(np.float16), ids, weights, gate_up, down), wanted) < 5e-3
    fewer = np.where(np.arange(TOP) == 1, -1, ids).astype(np.int32)
    assert distance(nibble.moe(x, fewer, weights, gate_up, down), expected(x, fewer, weights, parts, downs)) < 1e-5
    out = np.empty((T, N), np.float32)
    assert nibble.moe(x, ids, weights, gate_up, down, out=out) is out and np.array_equal(out, y)
    deeper = nibble.moe(x.reshape(1, T, K), ids.reshape(1, T, TOP), weights.reshape(1, T, TOP), gate_up, down)
    assert deeper.shape == (1, T, N) and np.array_equal(deeper[0], y)
    assert repr(gate_up) == f"PackedExperts(5 of W[64,64], scheme='u4zg32', layout='{gate_up[0].layout}')"
    assert len(gate_up) == E and gate_up[3].unpack() == parts[3] and gate_up.nbytes == E * gate_up[0].nbytes
    again = pickle.loads(pickle.dumps((gate_up, down)))
    assert np.array_equal(nibble.moe(x, ids, weights, *again), y) and copy.deepcopy(down) is down


def test_errors(rng):
    parts, _, gate_up, down = layer(rng)
    x, ids, weights = np.ones((T, K), np.float32), np.zeros((T, TOP), np.int32), np.ones((T, TOP), np.float32)
    with pytest.raises(nibble.InvalidArgument, match=r"ids\[0,0\] and ids\[0,1\] are both 0"):
        nibble.moe(x, ids, weights, gate_up, down)
    ids[:, 1] = E
    with pytest.raises(nibble.InvalidArgument, match=r"ids\[0,1\]=5 is outside \[-1, 4\]"):
        nibble.moe(x, ids, weights, gate_up, down)
    with pytest.raises(nibble.InvalidArgument, match=r"ids must be s32 \[7,2\]"):
        nibble.moe(x, ids.astype(np.int64), weights, gate_up, down)
    ids[:, 1] = 1
    with pytest.raises(nibble.InvalidArgument, match="weights must be f32"):
        nibble.moe(x, ids, weights[:, :1], gate_up, down)
    with pytest.raises(nibble.InvalidArgument, match=r"x has shape \[7, 32\]"):
        nibble.moe(x[:, :32], ids, weights, gate_up, down)
    with pytest.raises(nibble.InvalidArgument, match="write 48 channels"):
        nibble.moe(x[:, :32], ids, weights, down, down)
    with pytest.raises(nibble.InvalidArgument, match=r"experts=0"):
        nibble.pack_experts([])
    with pytest.raises(nibble.InvalidArgument, match="experts 0 and 1 differ: W is"):
        nibble.pack_experts([parts[0], nibble.quantize(np.ones((32, K), np.float32), "u4zg32")])
    with pytest.raises(nibble.InvalidArgument, match="'max' is no score"):
        nibble.route(np.ones((2, 4), np.float32), 2, score="max")
    with pytest.raises(nibble.InvalidArgument, match=r"top_k=5 is outside \[1, 4\]"):
        nibble.route(np.ones((2, 4), np.float32), 5)


def test_no_tokens(torch, rng):
    """Empty tensors of PyTorch have no address."""
    _, _, gate_up, down = layer(rng)
    for tokens in [(0,), (0, 3), (3, 0)]:
        x, ids = torch.zeros(*tokens, K), torch.zeros(*tokens, TOP, dtype=torch.int32)
        assert nibble.moe(x, ids, torch.zeros(*tokens, TOP), gate_up, down).shape == (*tokens, N)
        assert nibble.grouped(x, gate_up, ids=ids).shape == (*tokens, TOP, I)


def test_layers_of_checkpoints(rng, tmp_path):
    """Experts one by one, and stored together with rows of gate and up that take turns, are packed as those that are read and joined."""
    layer_ = "model.layers.1.mlp.experts"
    gates, ups, downs = (rng.standard_normal((E, *shape), dtype=np.float32) for shape in ((I, K), (I, K), (K, I)))
    apart = {f"{layer_}.{e}.{name}.weight": w[e] for e in range(E) for name, w in (("w1", gates), ("w3", ups), ("w2", downs))}
    turns = np.stack([gates, ups], 2).reshape(E, 2 * I, K).transpose(0, 2, 1).copy()
    bias = rng.standard_normal((E, 2 * I), dtype=np.float32)
    together = {f"{layer_}.gate_up_proj": turns, f"{layer_}.gate_up_proj_bias": bias, f"{layer_}.down_proj": downs.transpose(0, 2, 1).copy(),
                f"{layer_}.down_proj_bias": np.zeros((E, K), np.float32)}  # fmt: skip
    x = rng.standard_normal((T, K), dtype=np.float32)
    ids, weights = nibble.route(rng.standard_normal((T, E), dtype=np.float32), TOP)
    for name, tensors in (("apart", apart), ("together", together)):
        write_safetensors(tmp_path / f"{name}.safetensors", tensors)
        checkpoint = nibble.open(tmp_path / f"{name}.safetensors")
        (found,) = nibble.expert_layers(checkpoint)
        assert (found.name, found.count, found.interleaved) == (layer_, E, name == "together")
        assert repr(found) == f"ExpertLayer(name='{layer_}', count=5)"
        gate_up, down = nibble.pack_expert_layer(checkpoint, found, m_max=16, glu_limit=7, glu_offset=1)
        assert (gate_up.n, gate_up.k, down.n, down.k, len(gate_up)) == (2 * I, K, K, I, E) and gate_up[0].m_max == 16
        for e in range(E):
            assert np.array_equal(dense(gate_up[e].unpack()), np.concatenate([gates[e], ups[e]]))
            assert np.array_equal(dense(down[e].unpack()), downs[e])
        y = nibble.moe(x, ids, weights, gate_up, down, activation="quick_gelu")
        wanted = np.zeros((T, K))
        for t in range(T):
            for j, e in enumerate(ids[t]):
                b = bias[e] if name == "together" else np.zeros(2 * I)
                gate, up = gates[e] @ x[t].astype(np.float64) + b[::2], ups[e] @ x[t].astype(np.float64) + b[1::2]
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
                wanted[t] += weights[t, j] * (downs[e] @ (gate / (1 + np.exp(-1.702 * gate)) * up))
        assert distance(y, wanted) < 1e-4
    with pytest.raises(nibble.NotFound, match=f"no layer of experts h.0; it has {layer_}"):
        nibble.pack_expert_layer(checkpoint, "h.0")


def test_routing_of_deepseek(rng):
    """As modeling_deepseek_v3 has it: sigmoid scores, a bias for the choice, the best groups by their two best experts."""
    logits, bias = rng.standard_normal((9, 16), dtype=np.float32), rng.standard_normal(16, dtype=np.float32)
    ids, weights = nibble.route(logits, 4, bias=bias, score="sigmoid", groups=4, top_groups=2, scale=2.5)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    choice = scores + bias
    groups = np.sort(choice.reshape(9, 4, 4), -1)[..., -2:].sum(-1)
    kept = np.argsort(-groups, 1)[:, :2]
    for t in range(9):
        allowed = np.full(16, -np.inf)
        for g in kept[t]:
            allowed[4 * g : 4 * g + 4] = choice[t, 4 * g : 4 * g + 4]
        best = np.argsort(-allowed)[:4]
        assert list(ids[t]) == list(best)
        assert np.allclose(weights[t], 2.5 * scores[t, best] / scores[t, best].sum(), atol=1e-6)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def models(name):
    transformers = pytest.importorskip("transformers")
    small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128)
    if name == "mixtral":
        config = transformers.MixtralConfig(**small, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    if name == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **small, intermediate_size=96, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)  # fmt: skip
        return transformers.Qwen3MoeForCausalLM(config)
    if name == "deepseek_v3":
        config = transformers.DeepseekV3Config(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=128, intermediate_size=96,
            moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1,
            q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)  # fmt: skip
        return transformers.DeepseekV3ForCausalLM(config)
    config = transformers.GptOssConfig(**small, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    return transformers.GptOssForCausalLM(config)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_of_transformers(torch, name):
    """A converted model against the same model whose experts have the numbers of the quantized ones."""
    import nibble.torch as nt

    torch.manual_seed(0)
    model = models(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1)
    converted = copy.deepcopy(model)
    names = nt.convert(converted, "u8b128g32", skip=lambda n: not n.endswith("experts"))
    assert names and all(isinstance(converted.get_submodule(n), nt.QuantExperts) for n in names)
    with torch.no_grad():
        for n in names:
            ours, theirs = converted.get_submodule(n), model.get_submodule(n)
            for part, scheme in (("gate_up_proj", True), ("down_proj", False)):
                weights = getattr(theirs, part)
                for e in range(weights.shape[0]):
                    w = weights[e].T if getattr(theirs, "is_transposed", False) else weights[e]
                    rounded = nibble.pack(nibble.quantize(w.contiguous(), "u8b128g32")).dequantize(out=torch.empty(w.shape))
                    weights[e] = rounded.T if getattr(theirs, "is_transposed", False) else rounded
            assert ours.num_experts == weights.shape[0]
        ids = torch.randint(128, (2, 9))
        assert distance(converted(ids).logits, model(ids).logits) < 1e-4


def test_experts_in_another_process(torch, rng, tmp_path):
    import nibble.torch as nt

    _, _, gate_up, down = layer(rng)
    experts, call = nt.QuantExperts(gate_up, down), (torch.randn(3, K), torch.tensor([[0, 3]] * 3), torch.rand(3, 2))
    (tmp_path / "all").write_bytes(pickle.dumps((experts, call, experts(*call))))
    program = f"import pickle, torch; e, call, y = pickle.load(open({str(tmp_path / 'all')!r}, 'rb')); assert torch.equal(e(*call), y)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_experts_as_tensors(torch):
    import nibble.torch as nt

    torch.manual_seed(0)
    model = models("gpt_oss").eval()
    nt.convert(model, "u4b8g32")
    experts = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(5, 64), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    with torch.no_grad():
        y = experts(x, ids, weights)
        for again in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
            assert torch.equal(again(x, ids, weights), y)
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, ids, weights), y)
        assert torch.equal(experts(x, torch.tensor([[0, 4]] * 5), weights), experts(x, ids[:, :1], weights[:, :1]))  # 4: of another process
        assert torch.equal(experts(x[:0], ids[:0], weights[:0]), x[:0])
    other = copy.deepcopy(experts)
    other.gate_up.zero_()
    other.load_state_dict(experts.state_dict())
    assert torch.equal(other(x, ids, weights), y)
    assert "scheme=u4b8g32" in repr(experts)
    with pytest.raises(nibble.Unsupported, match="CPUs and NVIDIA GPUs"):
        experts.to("meta")


def test_the_benchmark_rounds_to_mxfp4():
    torch = pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("moe", pathlib.Path(__file__).parents[2] / "bench/moe.py")
    moe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(moe)
    w = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    w[0], w[1, 3], w[2, 32:64] = 0, 0, 2.0**5  # a row without weights, a weight of 0, a group of a power of two
    q = moe.mxfp4(w)
    assert q.scheme == "e2m1g32"
    rounded = nibble.pack(q).dequantize().reshape(8, 3, 32).astype(np.float64)
    groups = w.numpy().reshape(8, 3, 32).astype(np.float64)
    largest = np.abs(groups).max(-1, keepdims=True)
    scales = 2.0 ** (np.floor(np.log2(np.maximum(largest, 2.0**-100))) - 2)  # of which 4 has the exponent of the largest weight
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = np.abs(np.abs(groups / scales)[..., None] - values).min(-1)
    assert np.array_equal(np.abs(rounded - groups) / scales, nearest)
    assert not rounded[0].any() and np.array_equal(rounded[2, 1], np.full(32, 32.0))


def test_transformers_reads_mxfp4(torch, tmp_path):
    """gpt-oss's floats as MXFP4: transformers dequantizes them to the numbers that nibble does, and its loss is nibble's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = models("gpt_oss").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "floats")
    report = nibble.quantize_checkpoint(tmp_path / "floats", tmp_path / "mxfp4", "e2m1g32")
    assert report.modules and all(row.scheme == "e2m1g32" and row.error.sqnr_db > 15 for row in report.modules)
    nibble.dequantize_checkpoint(tmp_path / "mxfp4", tmp_path / "again", dtype="bf16")
    read = lambda name, **more: transformers.GptOssForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16, **more)  # noqa: E731
    written = read("mxfp4", quantization_config=transformers.Mxfp4Config(dequantize=True))
    again = read("again")
    for name, w in again.state_dict().items():
        assert torch.equal(written.state_dict()[name], w), name
    experts = written.model.layers[0].mlp.experts
    before = model.model.layers[0].mlp.experts
    assert torch.equal(experts.gate_up_proj_bias, before.gate_up_proj_bias)
    assert 0 < distance(experts.gate_up_proj.float().detach(), before.gate_up_proj.float().detach()) < 0.2
