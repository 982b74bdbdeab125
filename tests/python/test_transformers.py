"""nibble.transformers and nibble.peft on small seeded models. Skipped without transformers, or PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import distance

import nibble

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers", minversion="5")
nt = pytest.importorskip("nibble.torch")
ours = pytest.importorskip("nibble.transformers")

# The format of `nibble quantize`, and the scheme.
FORMATS = [
    ("awq", "u4zg64"), ("gptq", "u4b8g64"), ("compressed-tensors", "u4b8g64"), ("compressed-tensors", "u4zg32"),
    ("int-quantized", "s8r_s8c"), ("float-quantized", "e4m3r_e4m3c"), ("fp8", "e4m3g128_e4m3b128x128"),
]  # fmt: skip


def configuration(kind: str, **changes):
    sizes = dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return {"llama": tf.LlamaConfig, "qwen2": tf.Qwen2Config}[kind](**{**sizes, "tie_word_embeddings": kind == "qwen2", **changes})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Float models by kind, in directories: f32, so that rounding is that of the layers alone."""
    directories = {}
    for kind, cls in (("llama", tf.LlamaForCausalLM), ("qwen2", tf.Qwen2ForCausalLM)):
        torch.manual_seed(7)
        model = cls(configuration(kind)).eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "norm" not in name:
                    p.normal_(0, 0.5 if name.endswith(".bias") else 0.05)
        directories[kind] = tmp_path_factory.mktemp(kind) / "float"
        model.save_pretrained(directories[kind])
    return directories


@pytest.fixture
def floats(models):
    """Qwen2: biases, and a head that is tied to the embedding."""
    return models["qwen2"]


@pytest.fixture
def ids():
    return torch.randint(2, 256, (2, 11), generator=torch.Generator().manual_seed(3))


def load(directory, **options):
    return tf.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits.numpy()


def as_matrices(directory, out):
    """The same checkpoint as floats, W bit for bit."""
    nibble.dequantize_checkpoint(directory, out, "f32")
    return load(out)


def quantized_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, nt.QuantLinear)}


def with_quantized_activations(dense, model):
    """The dense model, whose layers get activations that are quantized and back as those of `model` are."""

    def rounded(scheme):
        def hook(module, args):
            codes, scales, zeros = nibble.quantize_activations(args[0].flatten(0, -2), scheme)
            scales = scales.reshape(codes.shape[0], -1).repeat_interleave(codes.shape[1] // scales.reshape(codes.shape[0], -1).shape[1], 1)
            return (codes.float() * scales).unflatten(0, args[0].shape[:-1])

        return hook

    for name, layer in quantized_layers(model).items():
        if layer.weight.act_scheme:
            dense.get_submodule(name).register_forward_pre_hook(rounded(layer.weight.act_scheme))
    return dense


@pytest.mark.parametrize("format, scheme", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_quantized_checkpoints(models, ids, tmp_path, kind, format, scheme):
    nibble.quantize_checkpoint(models[kind], tmp_path / "quantized", scheme, format=format)
    model = load(tmp_path / "quantized")
    layers = quantized_layers(model)
    assert len(layers) == 14 and not [key for key in model.state_dict() if "qweight" in key or "weight_scale" in key]
    checkpoint = nibble.open(tmp_path / "quantized")
    for name, layer in layers.items():
        assert layer.weight.unpack() == checkpoint.read(name)
    act = scheme.rpartition("_")[0]
    assert {layer.weight.act_scheme for layer in layers.values()} == {act}
    dense = with_quantized_activations(as_matrices(tmp_path / "quantized", tmp_path / "dense"), model)
    # Each sum of up to 256 f32 products is within 256·2^-24 of the exact one; 14 layers in a row, which norms and the softmax amplify by
    # far less than 10. Where activations are rounded to codes, one that is at a boundary may become its neighbour: 2^-7 or 2^-4 of itself.
    bound = {"": 14 * 10 * 256 * 2.0**-24, "s8": 2.0**-7, "e4": 2.0**-4}[act[:2]]
    assert distance(logits(model, ids), logits(dense, ids)) < bound
    text = model.generate(ids[:1], max_new_tokens=8, min_new_tokens=8, do_sample=False)
    by_hand, last, cache = ids[:1], ids[:1], None
    with torch.no_grad():
        for _ in range(8):
            step = model(input_ids=last, past_key_values=cache, use_cache=True)
            last, cache = step.logits[:, -1:].argmax(-1), step.past_key_values
            by_hand = torch.cat([by_hand, last], 1)
    assert torch.equal(text, by_hand), (text, by_hand)


def act_ordered(directory, floats):
    """A GPTQ checkpoint in act-order, of the float one."""
    from safetensors.torch import save_file

    nibble.quantize_checkpoint(floats, directory, "u4b8g32", format="gptq")
    checkpoint, rng = nibble.open(directory), np.random.default_rng(0)
    tensors = {name: nibble._torch.weights._to_torch(checkpoint.tensor(name)) for name in checkpoint.tensors}
    for layer in checkpoint.layers:
        g_idx = tensors[f"{layer.name}.g_idx"]
        tensors[f"{layer.name}.g_idx"] = g_idx[torch.from_numpy(rng.permutation(len(g_idx)))].contiguous()
    del checkpoint
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (directory / "config.json").write_text(json.dumps(config))


def test_gptq_in_act_order(floats, ids, tmp_path):
    act_ordered(tmp_path / "gptq", floats)
    model = load(tmp_path / "gptq")
    assert all(layer.weight.act_order for layer in quantized_layers(model).values())
    assert distance(logits(model, ids), logits(as_matrices(tmp_path / "gptq", tmp_path / "dense"), ids)) < 14 * 10 * 256 * 2.0**-24


@pytest.mark.parametrize("scheme", ["u4zg128", "u4b8g32", "s8r_s8c"])
def test_quantizing_while_loading(floats, ids, tmp_path, scheme):
    model = load(floats, quantization_config=ours.NibbleConfig(scheme))
    wanted = load(floats)
    nt.convert(wanted, scheme)
    for name, layer in quantized_layers(wanted).items():
        assert layer.weight.unpack() == model.get_submodule(name).weight.unpack()
    assert np.array_equal(logits(model, ids), logits(wanted, ids))
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and "lm_head" in config["ignore"]
    assert np.array_equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))


def test_what_is_skipped_stays_float(floats):
    config = ours.NibbleConfig("u4zg128", skip=["k_proj", "layers.1", "lm_head"])
    assert set(quantized_layers(load(floats, quantization_config=config))) == {
        f"model.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    }  # fmt: skip
    with pytest.warns(UserWarning, match="groups do not divide K=128"):
        some = quantized_layers(load(floats, quantization_config=ours.NibbleConfig("u4zg256")))
    assert set(some) == {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    for wrong in (dict(scheme="q9_u4zg128"), dict(skip="(")):
        with pytest.raises(nibble.InvalidArgument):
            ours.NibbleConfig(**wrong)


def test_a_quantized_head(floats, ids, tmp_path):
    """Of a model whose head was tied to the embedding, which stays as it is."""
    model = load(floats, quantization_config=ours.NibbleConfig("u4zg128", head="u8b128g128"))
    assert model.lm_head.weight.scheme == "u8b128g128" and len(quantized_layers(model)) == 15
    assert not model.config.tie_word_embeddings and torch.equal(model.model.embed_tokens.weight, load(floats).model.embed_tokens.weight)
    assert 0 < distance(logits(model, ids), logits(load(floats, quantization_config=ours.NibbleConfig("u4zg128")), ids)) < 0.01
    with torch.no_grad():
        assert model.generate(ids, max_new_tokens=3).shape == (2, 14)
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.lm_head.weight.unpack() == model.lm_head.weight.unpack() and np.array_equal(logits(again, ids), logits(model, ids))
    with pytest.raises(nibble.InvalidArgument):
        ours.NibbleConfig("u4zg128", head="q9_u4")


def test_other_heads(floats, ids, tmp_path):
    """Of a checkpoint with another head, or none; a new head is not quantized."""
    nibble.quantize_checkpoint(floats, tmp_path / "awq", "u4zg64", format="awq")
    for source, options in ((tmp_path / "awq", {}), (floats, {"quantization_config": ours.NibbleConfig("u4zg64")})):
        for cls in (tf.AutoModel, tf.AutoModelForSequenceClassification):
            model = cls.from_pretrained(source, **options)
            assert len(quantized_layers(model)) == 14
    assert isinstance(model.score, torch.nn.Linear)


EXPERTS = dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64)


@pytest.mark.parametrize("format, scheme", [("awq", "u4zg64"), ("gptq", "u4b8g64"), ("compressed-tensors", "u4b8g64"), ("int-quantized", "s8r_s8c")])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
def test_checkpoints_of_experts(tmp_path, kind, format, scheme):
    """Against the float model of the same numbers, which quantize_checkpoint and dequantize_checkpoint make expert by expert."""
    own = {"Mixtral": dict(num_local_experts=3), "Qwen3Moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=64)}
    sizes = EXPERTS | own[kind]
    torch.manual_seed(3)
    getattr(tf, f"{kind}ForCausalLM")(getattr(tf, f"{kind}Config")(**sizes)).half().save_pretrained(tmp_path / "float")
    nibble.quantize_checkpoint(tmp_path / "float", tmp_path / "quantized", scheme, format=format, skip=r"(lm_head|embed_tokens|gate)$")
    nibble.dequantize_checkpoint(tmp_path / "quantized", tmp_path / "again", "f32")
    model = load(tmp_path / "quantized")
    experts = [m for m in model.modules() if isinstance(m, nt.QuantExperts)]
    assert len(experts) == 2 and len(quantized_layers(model)) == 8
    ids = torch.randint(64, (2, 7))
    with torch.no_grad():
        wanted = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)(ids).logits
        assert distance(model(ids).logits, wanted) < (0.05 if "_" in scheme else 1e-4)


def test_experts_inside_one_tensor(tmp_path):
    sizes = EXPERTS | dict(num_hidden_layers=1, num_local_experts=2)
    tf.MixtralForCausalLM(tf.MixtralConfig(**sizes)).half().save_pretrained(tmp_path / "float")
    some = r"(lm_head|embed_tokens|gate|experts\.1\.w2)$"
    nibble.quantize_checkpoint(tmp_path / "float", tmp_path / "quantized", "u4b8g64", skip=some)
    with pytest.raises(nibble.NotFound, match=r"layers\.0\.mlp\.experts: 1 of the 2 layers inside down_proj are quantized"):
        load(tmp_path / "quantized")
    with pytest.warns(UserWarning, match="MixtralTopKRouter is no layer"):
        model = load(tmp_path / "float", quantization_config=ours.NibbleConfig("u4b8g64"))
    assert len(quantized_layers(model)) == 4 and isinstance(model.model.layers[0].mlp.experts, nt.QuantExperts)
    for lose in (lambda: model.save_pretrained(tmp_path / "lost"), model.dequantize):
        with pytest.raises(nibble.Unsupported, match=r"layers\.0\.mlp\.experts: .* quantized experts"):
            lose()


def facts(checkpoint):
    return {m.name: (m.format, m.scheme, m.claimed) for m in checkpoint.layers}


@pytest.mark.parametrize("format, scheme", FORMATS)
def test_saving_what_was_read(floats, ids, tmp_path, format, scheme):
    nibble.quantize_checkpoint(floats, tmp_path / "quantized", scheme, format=format)
    model = load(tmp_path / "quantized")
    model.save_pretrained(tmp_path / "saved")
    before, after = nibble.open(tmp_path / "quantized"), nibble.open(tmp_path / "saved")
    assert facts(after) == facts(before)
    assert all(after.read(m.name) == before.read(m.name) for m in before.layers)
    assert np.array_equal(logits(load(tmp_path / "saved"), ids), logits(model, ids))


def test_dequantize(floats, ids, tmp_path):
    nibble.quantize_checkpoint(floats, tmp_path / "awq", "u4zg64", format="awq")
    model = load(tmp_path / "awq")
    before = logits(model, ids)
    dense = model.dequantize()
    assert not quantized_layers(dense) and distance(logits(dense, ids), before) < 14 * 10 * 256 * 2.0**-24


def test_compile(floats, ids):
    model = load(floats, quantization_config=ours.NibbleConfig("u4zg128"))
    torch.compiler.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert distance(compiled(input_ids=ids, use_cache=False).logits, logits(model, ids)) < 1e-5


def test_what_cannot_be_loaded(floats, tmp_path):
    nibble.quantize_checkpoint(floats, tmp_path / "awq", "u4zg64", format="awq")
    with pytest.raises(nibble.Unsupported, match="device_map"):
        load(tmp_path / "awq", device_map={"model": "cpu", "lm_head": "disk"})
    ours.unregister(["awq"])
    try:
        with pytest.raises(Exception, match="(?i)gptqmodel|awq"):
            load(tmp_path / "awq")
    finally:
        ours.register(["awq"])
    with pytest.raises(nibble.InvalidArgument, match="gguf"):
        ours.register(["gguf"])
    path = tmp_path / "awq" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises((nibble.CorruptData, Exception)):
        load(tmp_path / "awq")


MEMORY = """
import gc, sys, threading, time
import torch, transformers
import nibble, nibble.transformers

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

directory, scheme = sys.argv[1:]
options = {"quantization_config": nibble.transformers.NibbleConfig(scheme)} if scheme else {}
load = lambda: transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16, **options)
load()  # modules are imported, threads started
gc.collect()
peak, done = [0], False

def watch():
    while not done:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
before = anonymous()
thread.start()
model = load()
done = True
thread.join()
print(peak[0] - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers())))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("scheme", ["", "u4zg128"])
def test_memory_while_loading(tmp_path, scheme):
    """Besides the packed model one layer: its decoded codes (a byte each), scales and packed bytes; never the float weights."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=768, intermediate_size=3072, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=8)
    tf.LlamaForCausalLM(configuration("llama", **sizes)).half().save_pretrained(tmp_path / "float")
    source = tmp_path / "float"
    if not scheme:
        nibble.quantize_checkpoint(source, tmp_path / "awq", "u4zg128", format="awq")
        source = tmp_path / "awq"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(source), scheme], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    peak, model = map(int, done.stdout.split())
    layer = 768 * 3072
    floats = 6 * (4 * 768 * 768 + 3 * layer) * 2
    # A layer is decoded to a byte a code, packed, and copied; 16 MB are for the heaps of threads.
    assert model < peak < model + 3 * layer + (16 << 20) < floats, (peak, model, floats)


# --- PEFT -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def test_lora(floats, ids, tmp_path, peft):
    import nibble.peft

    model = load(floats, quantization_config=ours.NibbleConfig("u4zg128"))
    before = logits(model, ids)
    config = nibble.peft.register(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0))
    tuned = peft.get_peft_model(model, config)
    assert np.array_equal(logits(tuned, ids), before)  # B is 0 in the beginning
    packed = {name: layer.packed.clone() for name, layer in quantized_layers(tuned).items()}
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(8):
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(packed[name], layer.packed) for name, layer in quantized_layers(tuned).items())
    after = logits(tuned.eval(), ids)
    with tuned.disable_adapter():
        assert np.array_equal(logits(tuned, ids), before)
    with pytest.raises(nibble.Unsupported, match="merged"):
        tuned.merge_and_unload()
    tuned.save_pretrained(tmp_path / "adapter")
    again = load(floats, quantization_config=ours.NibbleConfig("u4zg128"))
    config = nibble.peft.register(peft.LoraConfig.from_pretrained(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter", config=config)
    assert np.array_equal(logits(again, ids), after)
    with pytest.raises(ValueError):
        peft.get_peft_model(load(floats, quantization_config=ours.NibbleConfig("u4zg128")),
                            nibble.peft.register(peft.LoraConfig(target_modules=["q_proj"], use_dora=True)))  # fmt: skip
