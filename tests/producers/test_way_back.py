"""What nibble writes, as compressed-tensors and transformers load it: the same numbers as nibble's own. NIBBLE_CLI is the program."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
from safetensors.torch import load_file, save_file  # noqa: E402

NIBBLE = os.environ.get("NIBBLE_CLI", str(pathlib.Path(__file__).resolve().parents[2] / "build" / "bin" / "nibble"))


def nibble(*arguments) -> None:
    done = subprocess.run([NIBBLE, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def float_model(folder: pathlib.Path, tied: bool, dtype) -> pathlib.Path:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied
    )
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def load(folder: pathlib.Path, dtype, **how):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **how)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(8)[None]).logits).all()
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def check(folder: pathlib.Path, scratch: pathlib.Path, dtype, activations=False, packed_zeros=False, skipped=()) -> None:
    """Every weight that transformers makes of the checkpoint is what nibble dequantizes it to, and the layers that are quantized are so."""
    if json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8":
        decoded = load(folder, dtype, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))
    else:
        decoded = load(folder, dtype, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))
        # transformers 5.23 loads no packed zero points as they are, those that compressed-tensors has written neither
        schemes = {} if packed_zeros else {name: getattr(m, "quantization_scheme", None) for name, m in load(folder, dtype).items()}
        for name, scheme in schemes.items():
            assert (scheme is None) == (name == "lm_head" or name.endswith(tuple(skipped))), name
            assert scheme is None or (scheme.input_activations is not None) == activations, name
    nibble("dequantize", folder, scratch / "float", "--dtype", "bf16" if dtype == torch.bfloat16 else "f16")
    exact = load_file(scratch / "float" / "model.safetensors")
    assert len(decoded) == 15
    for name, module in decoded.items():
        if name != "lm_head":
            assert torch.equal(module.weight, exact[f"{name}.weight"]), name


PACK = ["--format", "compressed-tensors", "--scheme"]
FORMATS = {
    "w4a16": ([*PACK, "u4b8g32"], {}),
    "w4a16_asymmetric": ([*PACK, "u4zg32"], {"packed_zeros": True}),
    "w8a16_channel": ([*PACK, "u8b128c"], {}),
    "w8a8": (["--format", "int-quantized"], {"activations": True}),
    "fp8": (["--format", "float-quantized"], {"activations": True}),
    "fp8_block": (["--format", "float-quantized", "--scheme", "e4m3g128_e4m3b128x128"], {"activations": True}),
    "hf_fp8": (["--format", "fp8"], {}),
}


def cases():
    for name in FORMATS:
        for tied in (False, True):
            for dtype in (torch.float16, torch.bfloat16):
                yield pytest.param(name, tied, dtype, id=f"{name}-{'tied' if tied else 'untied'}-{str(dtype)[6:]}")


@pytest.mark.parametrize(("name", "tied", "dtype"), cases())
def test_quantize(name, tied, dtype, tmp_path):
    options, expected = FORMATS[name]
    nibble("quantize", float_model(tmp_path / "in", tied, dtype), tmp_path / "out", *options)
    check(tmp_path / "out", tmp_path, dtype, **expected)


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "fp8"])
def test_skipped_layers_are_ignored(name, tmp_path):
    options, expected = FORMATS[name]
    model = float_model(tmp_path / "in", False, torch.float16)
    nibble("quantize", model, tmp_path / "out", *options, "--skip", "lm_head|embed|down_proj|layers.1.self_attn.o_proj")
    check(tmp_path / "out", tmp_path, torch.float16, **expected, skipped=("down_proj", "layers.1.self_attn.o_proj"))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (["--format", "awq", "--scheme", "u4zg32"], "compressed-tensors", {"packed_zeros": True}),
        (["--format", "gptq", "--scheme", "u4b8g32"], "compressed-tensors", {}),
        (["--format", "fp8"], "float-quantized", {"activations": True}),
    ],
    ids=["awq", "gptq", "fp8"],
)
def test_convert(first, second, expected, tmp_path):
    nibble("quantize", float_model(tmp_path / "in", False, torch.float16), tmp_path / "first", *first)
    nibble("convert", tmp_path / "first", tmp_path / "out", "--format", second)
    check(tmp_path / "out", tmp_path, torch.float16, **expected)


def test_int8_weights_alone(tmp_path):
    nibble("quantize", float_model(tmp_path / "in", False, torch.float16), tmp_path / "first", "--format", "int-quantized")
    path = tmp_path / "first" / "config.json"
    config = json.loads(path.read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group |= {"format": "int-quantized", "input_activations": None}
    path.write_text(json.dumps(config))
    nibble("convert", tmp_path / "first", tmp_path / "out", "--format", "int-quantized")
    check(tmp_path / "out", tmp_path, torch.float16)


MIXTURES = {
    "qwen3_moe": lambda sizes: transformers.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=64, **sizes),
    "mixtral": lambda sizes: transformers.MixtralConfig(num_local_experts=4, **sizes | {"intermediate_size": 64}),
}


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_that_were_stored_together(model_type, tmp_path):
    """Fused as transformers has them in memory: quantized one by one, under names by which transformers finds them."""
    torch.manual_seed(1)
    sizes = dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2)
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES[model_type](sizes)).to(torch.bfloat16)
    (tmp_path / "in").mkdir()
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "in")
    nibble("quantize", tmp_path / "in", tmp_path / "out", *PACK, "u4b8g32")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False)
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    nibble("dequantize", tmp_path / "out", tmp_path / "float", "--dtype", "bf16")
    exact = load_file(tmp_path / "float" / "model.safetensors")
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    experts = {name: tensor for name, tensor in loaded.named_parameters() if ".experts." in name}
    assert len(experts) == 2
    for name, tensor in experts.items():
        layer, matrix = name.rsplit(".", 1)
        for e, own in enumerate(tensor):
            parts = [exact[f"{layer}.{e}.{part}.weight"] for part in ((gate, up) if matrix == "gate_up_proj" else (down,))]
            assert torch.equal(own, torch.cat(parts)), name


def test_floats_of_mxfp4_are_those_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    nibble("sample", tmp_path / "in", "--shapes", "tiny", "--experts", "4", "--family", "gpt-oss", "--vocab", "64")
    nibble("dequantize", tmp_path / "in", tmp_path / "out", "--dtype", "bf16")
    stored, floats = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    for matrix in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{matrix}"
        wanted = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.bfloat16)
        assert torch.equal(floats[name], wanted.cpu()) and torch.equal(floats[f"{name}_bias"], stored[f"{name}_bias"])
