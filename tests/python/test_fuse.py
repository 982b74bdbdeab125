"""nibble.torch.fuse on small seeded models of transformers, and its layers. Skipped without PyTorch or transformers."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import warnings

import numpy as np
import pytest
from conftest import act_ordered, distance

import nibble

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers", minversion="5")
nt = pytest.importorskip("nibble.torch")
ours = pytest.importorskip("nibble.transformers")
nn = torch.nn

SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=False)  # fmt: skip
# What is fused whole, and what more their configurations say.
WHOLE = {"Llama": {}, "Mistral": {}, "Qwen2": {}, "Qwen3": dict(head_dim=64), "Gemma": dict(head_dim=32), "Phi3": {}}
FAMILIES = WHOLE | {"Mixtral": dict(num_local_experts=4)}
LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def make(kind, **more):
    torch.manual_seed(7)
    model = getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**{**SIZES, **FAMILIES.get(kind, {}), **more})).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
            else:
                p.normal_(0, 0.5 if name.endswith(".bias") else 0.08)
    return model


def quantized(kind, scheme="u4b8g64", **more):
    model = make(kind, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nt.convert(model, scheme, skip=rf"{nibble._torch.convert._SKIP}|\.experts$")  # experts stay float
    return model


def exact(model):
    """The unfused model in double precision, with its quantized layers as matrices."""
    dense = copy.deepcopy(model)
    for name, layer in list(dense.named_modules()):
        if isinstance(layer, nt.QuantLinear):
            matrix = nn.Linear(layer.in_features, layer.out_features, bias=layer.weight.has_bias)
            matrix.weight = nn.Parameter(layer.dequantize())
            if layer.weight.has_bias:
                matrix.bias = nn.Parameter(layer.bias.float())
            dense.set_submodule(name, matrix)
    if hasattr(dense.config, "_experts_implementation"):
        dense.config._experts_implementation = "eager"  # others are of smaller types
    return dense.double()


@pytest.fixture
def ids():
    return torch.randint(2, 256, (2, 11), generator=torch.Generator().manual_seed(3))


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.double().numpy()


def blocks(model):
    return list(model.model.layers)


@pytest.mark.parametrize("kind, dtype", [*((kind, torch.float32) for kind in FAMILIES), ("Qwen3", torch.bfloat16), ("Gemma", torch.bfloat16)])
def test_a_fused_model_is_as_exact(ids, kind, dtype):
    plain = quantized(kind)
    plain.set_attn_implementation("eager")  # which answers with attentions
    truth = logits(exact(plain), ids)
    plain = plain.to(dtype)
    model = copy.deepcopy(plain)
    fused = nt.fuse(model)
    here = LAYERS if kind in WHOLE else LAYERS[:2]
    assert fused == [f"model.layers.{i}.{layer}" for i in range(2) for layer in here]
    experts = {f"model.layers.{i}.mlp": "MixtralSparseMoeBlock has no gate_proj" for i in range(2)}
    assert fused.left == ({} if kind in WHOLE else experts)
    # The same sums, norms and products are rounded in another order, and fewer times.
    assert distance(logits(model, ids), truth) < 2 * distance(logits(plain, ids), truth)
    assert nt.fuse(model) == []  # nothing is left to do
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    if dtype == torch.float32:
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    answers = [m(input_ids=ids, output_hidden_states=True, output_attentions=True) for m in (model, plain)]
    assert [(len(answer.hidden_states), len(answer.attentions)) for answer in answers] == [(3, 2), (3, 2)]


@pytest.mark.parametrize("kind, scheme", [("Qwen2", "u4zg64"), ("Qwen2", "s8r_s8c"), ("Llama", "e4m3r_e4m3t"), ("Phi3", "s8r_u4b8g64")])
def test_unfuse_gives_the_layers_back(ids, kind, scheme):
    plain = quantized(kind, scheme)
    model = copy.deepcopy(plain)
    assert len(nt.fuse(model)) == 8
    # Activations near a boundary between two codes may become the neighbour: 2^-7 of themselves, of e4m3 2^-4.
    bound = {"u4": 1e-5, "s8": 2.0**-7, "e4": 2.0**-4}[scheme[:2]]
    assert distance(logits(model, ids), logits(plain, ids)) < bound
    nt.unfuse(model)
    before, after = plain.state_dict(), model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert [type(block) for block in blocks(model)] == [type(block) for block in blocks(plain)]
    assert np.array_equal(logits(model, ids), logits(plain, ids))


def test_convert_fuses(ids):
    model = make("Llama")
    names = nt.convert(model, "u4b8g64", fuse=True)
    assert len(names) == 14 and names.fused == [f"model.layers.{i}.{layer}" for i in range(2) for layer in LAYERS]
    assert nt.convert(make("Llama"), "u4b8g64").fused is None
    with pytest.warns(UserWarning, match="converted nothing"):
        nothing = nt.convert(make("Llama"), "u4b8g64", skip=".", fuse=True)
    assert nothing.fused == [] and nothing.fused.left["model.layers.0.self_attn"] == "q_proj is Linear; a QuantLinear without an activation function can be joined"


def test_compile(ids):
    model = quantized("Qwen3")
    nt.fuse(model)
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert distance(compiled(input_ids=ids, use_cache=False).logits, logits(model, ids)) < 1e-5
    torch.compiler.reset()
    losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in (compiled, model)]
    torch.testing.assert_close(*losses)


def test_copies_and_state(ids, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model = quantized("Llama")
    nt.fuse(model)
    expected = logits(model, ids)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert np.array_equal(logits(same, ids), expected) and isinstance(blocks(same)[0], type(blocks(quantized("Llama"))[0]))
        nt.unfuse(same)
        assert type(blocks(same)[0]) is type(blocks(quantized("Llama"))[0])
    assert {key for key in model.state_dict() if "layers.0" in key} == {
        *(f"model.layers.0.{layer}.packed" for layer in LAYERS), *(f"model.layers.0.{layer}.norm.weight" for layer in ("qkv_proj", "gate_up_proj"))
    }  # fmt: skip
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = make("Llama")
    with torch.no_grad():
        other.model.embed_tokens.weight.zero_()
    nt.convert(other, "u8b128g64", fuse=True)
    assert other.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors")) is not None
    assert np.array_equal(logits(other, ids), expected)
    with pytest.raises(RuntimeError, match="Unexpected key.*qkv_proj.bias"):
        other.load_state_dict({**model.state_dict(), "model.layers.0.qkv_proj.bias": torch.ones(3)})
    half = model.half()
    assert half.model.layers[0].qkv_proj.weight.dtype == torch.float16 and distance(logits(half, ids), expected) < 0.01


@pytest.mark.parametrize("kind", ["Qwen2", "Gemma"])
def test_gradients(ids, kind):
    plain = quantized(kind)
    model = copy.deepcopy(plain)
    nt.fuse(model)
    for m in (plain, model):
        m(input_ids=ids, labels=ids).loss.backward()
    nt.unfuse(model)  # the norms have their names again
    expected = {name: p.grad for name, p in plain.named_parameters()}
    got = {name: p.grad for name, p in model.named_parameters()}
    assert got.keys() == expected.keys() and not [name for name, grad in got.items() if grad is None]
    for name, grad in got.items():
        assert distance(grad, expected[name]) < 1e-4, name


@pytest.mark.parametrize("kind, more, why", [
    ("Granite", dict(residual_multiplier=0.5), "is not x \\+= attention"),
    ("Gemma2", dict(head_dim=32), "has a pre_feedforward_layernorm, too: Gemma2RMSNorm"),
    ("Starcoder2", {}, "LayerNorm is no RMSNorm of 128 channels"),
    ("Phi3", dict(resid_pdrop=0.1), "has a resid_attn_dropout, too: Dropout"),
    ("Llama", dict(hidden_act="tanh"), "LlamaMLP is not down_proj\\(activation"),
])  # fmt: skip
def test_other_forms_are_left(ids, kind, more, why):
    model = quantized(kind, **more)
    before = logits(model, ids)
    fused = nt.fuse(model)
    assert not [name for name in fused if "gate_up" in name] and any(re.search(why, text) for text in fused.left.values()), fused.left
    assert distance(logits(model, ids), before) < 1e-5


def test_layers_that_cannot_be_joined(ids):
    def left(change):
        model = make("Llama")
        change(model)
        fused = nt.fuse(model)
        assert distance(logits(model, ids), logits(model, ids)) == 0  # it runs
        assert fused == [f"model.layers.{i}.{layer}" for i in range(2) for layer in LAYERS[2:]]
        return fused.left["model.layers.1.self_attn"]

    def float_layer(model):
        nt.convert(model, "u4b8g64", skip=["k_proj", "lm_head"])

    def another_scheme(model):
        nt.convert(model, "u4b8g32", skip=lambda name: "v_proj" not in name)
        nt.convert(model, "u4b8g64")

    def other_activations(model):
        nt.convert(model, "s8r_s8c", skip=lambda name: "v_proj" not in name)
        nt.convert(model, "s8c")

    def act_order(model):
        nt.convert(model, "u4zg64")
        for block in blocks(model):
            block.self_attn.k_proj = nt.QuantLinear(act_ordered(np.random.default_rng(0), n=64, k=128), dtype=torch.float32)

    assert left(float_layer) == "k_proj is Linear; a QuantLinear without an activation function can be joined"
    assert "u4b8g64 and u4b8g32" in left(another_scheme)
    assert left(other_activations) == "act_scheme of q_proj and v_proj is '' and 's8r'"
    assert "g_idx differs" in left(act_order)
    assert "192 rows end inside a block of 128" in left(lambda model: nt.convert(model, "e4m3b128x128"))


def test_what_hooks_would_lose():
    model = quantized("Llama")
    first, second = blocks(model)
    first.self_attn.q_proj.register_forward_hook(lambda *_: None)
    first.mlp.register_forward_pre_hook(lambda *_: None)
    second.forward = second.forward
    fused = nt.fuse(model)
    assert fused == [] and len(fused.left) == 3
    assert fused.left["model.layers.0.self_attn"].startswith("q_proj has hooks") and fused.left["model.layers.0.mlp"].startswith("mlp has hooks")
    assert "forward pass of its own" in fused.left["model.layers.1"]


def test_a_model_without_numbers():
    model = quantized("Llama").to("meta")
    with pytest.raises(nibble.InvalidArgument, match="model.layers.0: its weights are on the meta device"):
        nt.fuse(model)


# --- one layer ------------------------------------------------------------------------------------------------------------------


class Gemma(nn.Module):
    """y · (1 + weight)."""

    def __init__(self, k, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(k)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def parts(rng, k=128, names=("gate", "up"), scheme="u4b8g32"):
    return {name: nibble.quantize(rng.standard_normal((64, k), dtype=np.float32), scheme) for name in names}


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("cls", [nn.RMSNorm, Gemma])
@pytest.mark.parametrize("activation, function", [
    ("silu", nn.functional.silu), ("gelu_tanh", lambda x: nn.functional.gelu(x, approximate="tanh")), ("gelu_erf", nn.functional.gelu),
])  # fmt: skip
def test_fused_linear(rng, cls, eps, activation, function):
    torch.manual_seed(0)
    norm = cls(128, eps=eps)
    with torch.no_grad():
        norm.weight.add_(torch.randn(128))
    two = parts(rng)
    layer = nt.FusedLinear(two, glu=True, norm=norm, activation=activation)
    gate, up = (torch.from_numpy(nibble.pack(q).dequantize()).double() for q in two.values())
    for size in (1.0, 0.01):  # where eps counts
        x = size * torch.randn(2, 3, 128)
        residual = torch.randn(2, 3, 64)
        normed = copy.deepcopy(norm).double()(x.double()).detach()
        truth = function(normed @ gate.T) * (normed @ up.T) + residual
        with torch.no_grad():
            y = layer(x, residual)
            assert torch.equal(y, torch.ops.nibble.fused_linear(x, layer.packed, 64, activation, True, residual, norm.weight, eps, layer.norm_offset))
            assert torch.equal(layer(x[:, None, None], residual[:, None, None]), y[:, None, None])  # more dimensions than nibble has
        # Two sums of 128 products, 30·2^-24 of a norm, an exponential and a product: relative to the whole result.
        assert distance(y, truth) < 4 * 128 * 2.0**-24
    assert {name: q == two[name] for name, q in layer.split().items()} == {"gate": True, "up": True}
    assert "gate+up, in_features=128, out_features=64, glu=True" in repr(layer)


def test_split_gives_what_was_joined(rng):
    """Also where one part alone has a bias, and where a tensor's scale becomes one for each channel."""
    for scheme in ("u4zg32", "e4m3t"):
        two = parts(rng, scheme=scheme)
        two["up"] = nibble._torch.shards._replace(two["up"], bias=rng.standard_normal(64, dtype=np.float32))
        layer = nt.FusedLinear(two)
        assert layer.weight.has_bias and layer.split() == two
        x = torch.randn(3, 128)
        assert distance(layer(x), torch.cat([nt.QuantLinear(q)(x) for q in two.values()], -1)) < 2 * 128 * 2.0**-24


def test_fused_linear_passes_torchs_own_checks(rng):
    torch.manual_seed(0)
    x, residual = torch.randn(2, 3, 128, requires_grad=True), torch.randn(2, 3, 64, requires_grad=True)
    norm = nn.RMSNorm(128, eps=1e-5)
    joined = nt.FusedLinear(parts(rng), norm=norm)
    glu = nt.FusedLinear(parts(rng), glu=True, norm=norm, activation="gelu_tanh")
    op = torch.ops.nibble.fused_linear
    torch.library.opcheck(op, (x, joined.packed, 128, "none", False, None, norm.weight, 1e-5, 0.0))
    torch.library.opcheck(op, (x, glu.packed, 64, "gelu_tanh", True, residual, norm.weight, 1e-5, 1.0))
    torch.library.opcheck(op, (x, nt.FusedLinear(parts(rng, names="o")).packed, 64, "none", False, residual, None, 1e-6, 0.0, joined.packed))
    inputs = x.detach(), residual.detach()
    exported = torch.export.export(glu, inputs)
    assert torch.equal(exported.module()(*inputs), glu(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        y = glu(x, residual)
        assert y.dtype == torch.float32 and glu(x).dtype == torch.bfloat16
    assert distance(y.detach(), glu(x, residual).detach()) < 0.02


def test_fused_linear_refuses(rng):
    two = parts(rng)
    with pytest.raises(nibble.Unsupported, match="LayerNorm is no RMSNorm of 128 channels"):
        nt.FusedLinear(two, norm=nn.LayerNorm(128))
    with pytest.raises(nibble.Unsupported, match="RMSNorm is no RMSNorm of 128 channels"):
        nt.FusedLinear(two, norm=nn.RMSNorm(64, eps=1e-6))
    with pytest.raises(nibble.InvalidArgument, match="a glu has two halves, but N=65"):
        nt.FusedLinear({"up": nibble.quantize(rng.standard_normal((65, 128), dtype=np.float32), "u4b8g32")}, glu=True)
    with pytest.raises(nibble.InvalidArgument, match="cannot be joined: the scheme is"):
        nt.FusedLinear({"a": two["gate"], **parts(rng, names="b", scheme="u4zg32")})
    x = torch.randn(3, 128)
    layer = nt.FusedLinear(two, glu=True)
    with pytest.raises(nibble.InvalidArgument, match=r"n=64, but the weight is W\[128,128\]"):
        torch.ops.nibble.fused_linear(x, layer.packed, 64)
    with pytest.raises(nibble.InvalidArgument, match="glu=False, but the weight was packed with glu=True"):
        torch.ops.nibble.fused_linear(x, layer.packed, 128)
    with pytest.raises(NotImplementedError, match="no gradient through quick_gelu"):
        torch.ops.nibble.fused_linear(x.requires_grad_(), layer.packed, 64, "quick_gelu", True).sum().backward()


# --- transformers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format, scheme", [
    ("awq", "u4zg64"), ("gptq", "u4b8g64"), ("compressed-tensors", "u4zg32"), ("int-quantized", "s8r_s8c"), ("float-quantized", "e4m3r_e4m3t"),
    ("fp8", "e4m3g128_e4m3b128x128"),
])  # fmt: skip
def test_a_fused_model_is_saved_as_it_was_read(ids, tmp_path, format, scheme):
    sizes = dict(hidden_size=256, intermediate_size=256, num_key_value_heads=2) if format == "fp8" else {}
    make("Qwen2", **sizes).save_pretrained(tmp_path / "float")
    nibble.quantize_checkpoint(tmp_path / "float", tmp_path / "quantized", scheme, format=format)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    plain = logits(model, ids)
    assert len(nt.fuse(model)) == 8
    fused = logits(model, ids)
    assert distance(fused, plain) < {"u4": 1e-5, "s8": 2.0**-7, "e4": 2.0**-4}[scheme[:2]]
    model.save_pretrained(tmp_path / "saved")
    before, after = nibble.open(tmp_path / "quantized"), nibble.open(tmp_path / "saved")
    assert {m.name: m.scheme for m in after.layers} == {m.name: m.scheme for m in before.layers}
    assert set(after.tensors) == set(before.tensors)
    assert all(after.read(m.name) == before.read(m.name) for m in before.layers)
    assert isinstance(blocks(model)[0], nibble._torch.fuse._Block) and np.array_equal(logits(model, ids), fused)  # as it was
    assert np.array_equal(logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32), ids), plain)
    assert not [m for m in model.dequantize().modules() if isinstance(m, (nt.QuantLinear, nt.FusedLinear))]


def test_quantizing_and_fusing_while_loading(ids, tmp_path):
    make("Llama").save_pretrained(tmp_path / "float")
    config = ours.NibbleConfig("u4b8g64", fuse=True)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config, dtype=torch.float32)
    assert all(isinstance(block.qkv_proj, nt.FusedLinear) for block in blocks(model))
    model.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"
    plain = quantized("Llama")
    assert distance(logits(model, ids), logits(plain, ids)) < 1e-5
    assert np.array_equal(logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32), ids), logits(plain, ids))


def test_adapters_need_the_layers():
    peft = pytest.importorskip("peft")
    import nibble.peft

    model = quantized("Llama")
    nt.fuse(model)
    config = nibble.peft.register(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    with pytest.raises(ValueError, match="not supported"):
        peft.get_peft_model(model, config)
    nt.unfuse(model)
    assert peft.get_peft_model(model, config) is not None
