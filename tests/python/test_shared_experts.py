"""Shared MLPs among the experts of their layer: DeepSeek's and Qwen2-MoE's blocks against themselves before. Skipped without transformers."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")
import nibble.torch as nt  # noqa: E402

H, I = 64, 32
SMALL = dict(hidden_size=H, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, vocab_size=128, intermediate_size=96, pad_token_id=0)


def make(kind, **more):
    torch.manual_seed(0)
    if kind == "deepseek":
        config = tf.DeepseekV3Config(
            **{**SMALL, **dict(moe_intermediate_size=I, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=2, n_group=4, topk_group=2,
                               first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16), **more})  # fmt: skip
        model = tf.DeepseekV3ForCausalLM(config)
    else:
        config = tf.Qwen2MoeConfig(
            **{**SMALL, **dict(moe_intermediate_size=I, shared_expert_intermediate_size=4 * I, num_experts=8, num_experts_per_tok=3), **more})  # fmt: skip
        model = tf.Qwen2MoeForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.1)
    return model.eval()


def converted(kind, scheme="u8b128g32", **more):
    model = make(kind, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nt.convert(model, scheme, skip=rf"{nibble._torch.convert._SKIP}|shared_expert_gate$")
    return model


def block_of(model):
    return model.model.layers[1].mlp


def child(kind):
    return "shared_experts" if kind == "deepseek" else "shared_expert"


@pytest.fixture
def ids():
    return torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("kind, shared", [("deepseek", 2), ("qwen2", 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused(ids, kind, shared, dtype):
    plain = converted(kind).to(dtype)
    model = copy.deepcopy(plain)
    fused = nt.fuse(model)
    assert "model.layers.1.mlp.experts" in fused and not any(child(kind) in name for name in fused.left)
    experts = block_of(model).experts
    assert (experts.shared, experts.num_experts) == (shared, 8) and f"8, shared={shared}, " in repr(experts)
    assert not any(child(kind) in name and "proj" in name for name in model.state_dict())  # nothing is there twice
    x = torch.randn(2, 5, H).to(dtype)
    with torch.no_grad():
        wanted, y = block_of(plain)(x), block_of(model)(x)
    # Two sums are rounded to bf16 in the plain block, and added; in the fused one once.
    assert distance(y.float(), wanted.float()) < (1e-6 if dtype == torch.float32 else 5e-3)
    assert distance(logits(model, ids), logits(plain, ids)) < (1e-5 if dtype == torch.float32 else 3e-2)
    again = nt.fuse(model)
    assert again == []


@pytest.mark.parametrize("kind", ["deepseek", "qwen2"])
@pytest.mark.parametrize("scheme", ["u4zg32", "s8r_s8c", "e4m3b32x32"])
def test_unfused(ids, kind, scheme):
    plain = converted(kind, scheme)
    model = copy.deepcopy(plain)
    assert "model.layers.1.mlp.experts" in nt.fuse(model)
    nt.unfuse(model)
    before, after = plain.state_dict(), model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(logits(model, ids), logits(plain, ids))


@pytest.mark.parametrize("kind", ["deepseek", "qwen2"])
def test_copies(ids, kind):
    model = converted(kind)
    nt.fuse(model)
    y = logits(model, ids)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(again, ids), y)
        nt.unfuse(again)
        assert distance(logits(again, ids), y) < 1e-5
    block, x = block_of(model), torch.randn(1, 3, H)
    with torch.no_grad():
        assert torch.equal(torch.compile(block, backend="aot_eager")(x), block(x))
        given = torch.tensor([[0, 8]] * 3), torch.rand(3, 2)  # 8: of another process, not the first shared one
        assert torch.equal(block.experts(x[0], *given), block.experts(x[0], given[0][:, :1], given[1][:, :1]))


def test_what_is_left():
    def why(model, kind="qwen2"):
        return nt.fuse(model).left[f"model.layers.1.mlp.{child(kind)}"]

    assert "are not experts of 32" in why(converted("qwen2", "s8c", shared_expert_intermediate_size=3 * I // 2))
    odd = converted("qwen2")
    block_of(odd).shared_expert.act_fn = torch.nn.GELU()
    assert why(odd) == "its activation is gelu_erf, that of the experts silu"
    hooked = converted("deepseek")
    block_of(hooked).shared_experts.register_forward_hook(lambda *args: None)
    assert "hooks" in why(hooked, "deepseek")
    other = make("qwen2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nt.convert(other, "u4b8g32", skip=rf"{nibble._torch.convert._SKIP}|\.experts$|gate$")
        nt.convert(other, "u8b128g32", skip=rf"{nibble._torch.convert._SKIP}|gate$")
    assert "the scheme is" in why(other)
    twice = converted("deepseek")

    class Twice(type(block_of(twice))):
        def forward(self, x):
            return 2 * super().forward(x)

    block_of(twice).__class__ = Twice
    assert "the forward pass of Twice is not experts" in why(twice, "deepseek")
    with torch.no_grad():
        assert torch.isfinite(block_of(twice)(torch.randn(1, 2, H))).all()
    with pytest.raises(nibble.InvalidArgument, match="2 shared experts of 2"):
        two = [nibble.quantize(np.ones((I, I), np.float32), "s8c")] * 2
        nt.QuantExperts(nibble.pack_experts(two, glu=True), nibble.pack_experts(two), shared=2)


@pytest.mark.parametrize("scheme", ["u4zg32", "s8c", "e4m3b32x32"])
def test_split(rng, scheme):
    """The sum of the experts is the MLP, with its biases."""
    bias = lambda q: nibble.QuantTensor(q.scheme, q.codes, q.scales, q.zeros, bias=rng.standard_normal(q.n, dtype=np.float32))  # noqa: E731
    gate, up, down = (bias(nibble.quantize(rng.standard_normal(shape, dtype=np.float32), scheme)) for shape in ((96, 64), (96, 64), (64, 96)))
    parts = nt.split_mlp(gate, up, down, 32)
    assert len(parts) == 3 and all((a.n, a.k, b.n, b.k) == (64, 64, 64, 32) for a, b in parts)
    x = rng.standard_normal((5, 64), dtype=np.float32)
    whole = nibble.pack(nibble.join([gate, up]), glu=True).linear(x, activation="silu")
    wanted = nibble.pack(down).linear(whole)
    gate_up, experts = nibble.pack_experts([a for a, _ in parts], glu=True), nibble.pack_experts([b for _, b in parts])
    ids = np.tile(np.arange(3, dtype=np.int32), (5, 1))
    assert distance(nibble.moe(x, ids, np.ones((5, 3), np.float32), gate_up, experts), wanted) < 1e-6
    assert nibble._torch.shared._join_mlp(parts) == {"gate_proj": gate, "up_proj": up, "down_proj": down}
    with pytest.raises(nibble.InvalidArgument, match="are not experts of 40"):
        nt.split_mlp(gate, up, down, 40)
