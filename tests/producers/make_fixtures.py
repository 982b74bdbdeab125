#!/usr/bin/env python3
"""Makes the checkpoints of tests/producers with the programs that people's checkpoints come from.

    build/venv/bin/python tests/producers/make_fixtures.py [PRODUCER...]

Every producer is installed from PyPI into a folder of its own, build/producers/NAME, in front of the packages of
tests/python/requirements.txt, which the interpreter has to have; what is needed beside them comes from PEERS. It quantizes a tiny
Llama with random weights, and its own code says what the quantized weights are worth: PRODUCER/CASE.expected.safetensors has them in
the type they are computed in, and producers_test.cpp reads PRODUCER/CASE bit for bit. versions.json says what made what.

Of AutoAWQ, GPTQModel and transformers, the code that packs is called alone, by choice: quantizing with them wants a GPU or calibration.
ModelOpt has no code that reads its int4: the expected values of w4a16_awq and w4a8_awq are the inverse of its code that packs.
A case without expected values is one that nibble has to refuse.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PACKAGES = ROOT / "build" / "producers"

# What the producers import, none of which decides what they write.
PEERS = """accelerate==1.15.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aiosignal==1.4.0 antlr4-python3-runtime==4.9.3 attrs==26.1.0
certifi==2026.10.19.post1 charset_normalizer==3.5.2 coloredlogs==15.0.1 datasets==5.2.0 defuser==0.0.28 device-smi==0.5.7 dill==0.4.1
evaluate==0.4.6 flatbuffers==25.12.19 frozenlist==1.8.0 humanfriendly==10.0 joblib==1.6.0 logbar==0.4.15 multidict==7.2.1
multiprocess==0.70.19 ninja==1.13.2 nvidia-ml-py==13.615.71 omegaconf==2.4.0 onnx==1.23.2 onnx-ir==1.1.0 onnxruntime==1.32.0
onnxscript==0.7.2 onnxslim==0.1.98 pandas==3.1.1 pillow==13.0.0 plotly==7.1.0 propcache==0.5.4 protobuf==7.36.2 pulp==3.3.2
py-cpuinfo==9.0.0 pyarrow==26.0.1 pypcre==0.6.4 python-dateutil==4.0.0 pytz==2026.6 requests==2.34.2 scipy==1.17.1 sentencepiece==0.2.3
six==1.17.0 threadpoolctl==3.8.0 tokenicer==0.0.14 torchao==0.18.0 torchvision==0.29.2 tzdata==2026.6 urllib3==2.8.0 xxhash==4.1.0
yarl==1.25.1 zstandard==0.25.0""".split()

# name: (packages, what makes its checkpoints)
PRODUCERS = {}


def producer(name: str, *packages: str):
    def register(make):
        PRODUCERS[name] = (packages, make)
        return make

    return register


# --- what all share ------------------------------------------------------------------------------------------------------------------


def tiny_llama(dtype: str = "bfloat16", tied: bool = False, seed: int = 1, hidden: int = 32, intermediate: int = 64):
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=hidden // 2, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def linears(model, skip=("lm_head",)):
    import torch

    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n not in skip}


def save(case: str, state: dict, config: dict, expected: dict | None, file_name: str = "config.json") -> None:
    """The checkpoint PRODUCER/CASE, and beside it what its quantized weights are worth; None: nibble refuses it."""
    from safetensors.torch import save_file

    folder = FOLDER / case
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if "lm_head.weight" in state and "model.embed_tokens.weight" in state and config.get("tie_word_embeddings"):
        state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    save_file({name: t.detach().cpu().contiguous() for name, t in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / file_name).write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    if expected is None:
        print(f"{case}: to be refused")
        return
    save_file({name: t.detach().cpu().contiguous() for name, t in expected.items()}, f"{folder}.expected.safetensors")
    print(f"{case}: {sum(t.numel() for t in expected.values())} weights of {len(expected)} modules")


def copy(case: str, folder: pathlib.Path, expected: dict | None) -> None:
    """The same for a checkpoint that the producer has written itself."""
    from safetensors.torch import load_file

    save(case, load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()), expected)
    for more in folder.glob("hf_quant_config.json"):
        shutil.copy(more, FOLDER / case)


def from_disk(producer: str, **how):
    """A tiny Llama as transformers loads it, for the producers that want to know where a model comes from."""
    import torch
    import transformers

    source = PACKAGES / f"{producer}-in"
    tiny_llama(**how).save_pretrained(source)
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)


# --- compressed-tensors --------------------------------------------------------------------------------------------------------------


def min_max(weight, args):
    """Scales in the type of the weight and zero points, for groups, channels, blocks or the whole."""
    import torch

    w = weight.float()
    n, k = w.shape
    strategy = getattr(args.strategy, "value", args.strategy)
    if strategy == "block":
        bn, bk = args.block_structure
        parts = w.reshape(n // bn, bn, k // bk, bk).permute(0, 2, 1, 3).reshape(n // bn, k // bk, -1)
    else:
        parts = {"group": lambda: w.reshape(n, -1, args.group_size), "channel": lambda: w.reshape(n, 1, -1), "tensor": lambda: w.reshape(1, -1)}[strategy]()
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    kind = getattr(args.type, "value", args.type)
    top = 448.0 if kind == "float" else 2.0 ** (args.num_bits - 1) - 1
    if args.symmetric:
        scale, zero = torch.maximum(-low, high) / top, None
        scale = scale.to(weight.dtype)
        zero = torch.zeros_like(scale)
    else:
        scale = ((high - low) / (2.0**args.num_bits - 1)).to(weight.dtype)
        zero = (-top - 1 - low / scale.float()).round().clamp(-top - 1, top)
    return scale, zero.to(torch.int8 if kind == "int" else torch.float8_e4m3fn)


def weights(bits=4, kind="int", strategy="group", group=16, symmetric=True, **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group if strategy == "group" else None, "symmetric": symmetric, "dynamic": False, **more}


def acts(bits=8, kind="int", strategy="token", symmetric=True, dynamic=True, **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": dynamic, **more}


def compressed_case(case, fmt, weight_args, input_args=None, act_order=False, dtype="bfloat16", tied=False, seed=1):
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    model = tiny_llama(dtype, tied, seed)
    group = {"targets": ["Linear"], "weights": weight_args, "input_activations": input_args}
    apply_quantization_config(model, QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head"], format=fmt, quantization_status="initialized"))  # fmt: skip
    expected = {}
    for index, (name, module) in enumerate(linears(model).items()):
        args = module.quantization_scheme.weights
        scale, zero = min_max(module.weight, args)
        module.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point = torch.nn.Parameter(zero, requires_grad=False)
        g_idx = None
        if act_order:
            columns = torch.randperm(module.in_features, generator=torch.Generator().manual_seed(index))
            g_idx = torch.empty_like(columns, dtype=torch.int32)
            g_idx[columns] = torch.arange(module.in_features, dtype=torch.int32) // args.group_size
            module.weight_g_idx = torch.nn.Parameter(g_idx, requires_grad=False)
        if hasattr(module, "input_scale"):
            module.input_scale = torch.nn.Parameter(torch.full_like(module.input_scale, 0.01 * (index + 1)), requires_grad=False)
        if hasattr(module, "input_zero_point") and input_args and not input_args["symmetric"]:
            module.input_zero_point = torch.nn.Parameter(torch.full_like(module.input_zero_point, index - 3), requires_grad=False)
        module.quantization_status = QuantizationStatus.FROZEN
        order = {} if g_idx is None else {"g_idx": g_idx}
        codes = quantize(module.weight, scale, zero, args, dtype=args.pytorch_dtype(), **order)
        expected[name] = dequantize(codes, scale, zero, args, **order)
    try:
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=fmt)
    except ValueError:  # a list of formats from 0.11 on
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=[fmt])
    config = json.loads(model.config.to_json_string(use_diff=False))
    folder = PACKAGES / "config"
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(compressor, "compress_model"):
        compressor.compress_model(model)
        state = model.state_dict()
    else:
        state = compressor.compress(model)
    (folder / "config.json").write_text(json.dumps(config))
    compressor.update_config(str(folder))
    save(case, state, json.loads((folder / "config.json").read_text()), expected)


def stacked_case(case, symmetric=True, seed=1):
    """Experts of all in one tensor, as llm-compressor 0.12 gave them to this code, and under the names that it saved them by."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    torch.manual_seed(seed)
    args = weights(symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    experts, hidden, inner = 3, 64, 32
    state, expected = {}, {}
    for matrix, shape in {"gate_up_proj": (experts, 2 * inner, hidden), "down_proj": (experts, hidden, inner)}.items():
        weight = torch.randn(shape).bfloat16()
        scale, zero = (torch.stack(parts) for parts in zip(*(min_max(w, scheme.weights) for w in weight)))
        packed = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        for suffix, tensor in packed.items():
            state[f"model.layers.0.mlp.experts.{matrix}_{suffix.removeprefix('weight_')}"] = tensor
        for e in range(experts):  # one by one, because it packs experts together but does not unpack them
            one = {name: tensor if name == "weight_shape" else tensor[e] for name, tensor in packed.items()}
            one["weight_shape"] = one["weight_shape"][1:]
            expected[f"model.layers.0.mlp.experts.{e}.{matrix}"] = compressor.decompress(one, scheme)["weight"]
    group = {"targets": ["Linear"], "weights": args, "input_activations": None, "format": "pack-quantized"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": []}
    save(case, state, {"model_type": "qwen3_5_moe", "quantization_config": config}, expected)


def compressed_tensors(name: str, blocks: bool = True, act_order: bool = True) -> None:
    pack, integer, fp8 = "pack-quantized", "int-quantized", "float-quantized"
    compressed_case(f"{name}/w4a16_group", pack, weights())
    compressed_case(f"{name}/w4a16_asymmetric", pack, weights(symmetric=False), seed=2)
    if act_order:
        compressed_case(f"{name}/w4a16_act_order", pack, weights(actorder="group"), act_order=True, dtype="float16", seed=3)
    compressed_case(f"{name}/w8a16_channel", pack, weights(8, strategy="channel"), seed=4)
    compressed_case(f"{name}/w8a8", integer, weights(8, strategy="channel"), acts(), tied=True, seed=5)
    compressed_case(f"{name}/w8a8_static", integer, weights(8, strategy="tensor"), acts(strategy="tensor", symmetric=False, dynamic=False), dtype="float32", seed=6)
    compressed_case(f"{name}/fp8", fp8, weights(8, "float", "channel"), acts(kind="float"), seed=7)
    compressed_case(f"{name}/fp8_static", fp8, weights(8, "float", "tensor"), acts(kind="float", strategy="tensor", dynamic=False), seed=8)
    if blocks:
        compressed_case(f"{name}/fp8_block", fp8, weights(8, "float", "block", block_structure=[16, 16]), acts(kind="float", strategy="group", group_size=16), seed=9)
        compressed_case(f"{name}/w3a16", pack, weights(3, symmetric=False), seed=10)


@producer("compressed-tensors-0.6", "compressed-tensors==0.6.0")
def compressed_tensors_06():
    compressed_tensors("compressed-tensors-0.6", blocks=False)


@producer("compressed-tensors-0.9", "compressed-tensors==0.9.4")
def compressed_tensors_09():
    compressed_tensors("compressed-tensors-0.9", blocks=False)


@producer("compressed-tensors-0.12", "compressed-tensors==0.12.2")
def compressed_tensors_012():
    compressed_tensors("compressed-tensors-0.12")


@producer("compressed-tensors-0.19", "compressed-tensors==0.19.0")
def compressed_tensors_019():
    compressed_tensors("compressed-tensors-0.19", act_order=False)


@producer("compressed-tensors-0.20", "compressed-tensors==0.20.0")
def compressed_tensors_020():
    compressed_tensors("compressed-tensors-0.20", act_order=False)
    stacked_case("compressed-tensors-0.20/experts_w4a16_group", seed=11)
    stacked_case("compressed-tensors-0.20/experts_w4a16_asymmetric", symmetric=False, seed=12)


# --- AutoAWQ, GPTQModel ---------------------------------------------------------------------------------------------------------------


def groups_of(weight, bits: int, size: int, symmetric: bool):
    """Scales [N, K/size] in f16 and zero points, for codes from 0 to 2^bits - 1."""
    import torch

    parts = weight.float().unflatten(-1, (-1, size))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    if symmetric:
        return (torch.maximum(-low, high) / (2 ** (bits - 1) - 1)).half().float(), torch.full_like(low, 2 ** (bits - 1))
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(0, 2**bits - 1)


def replace_linears(model, make):
    """Every linear layer but the head by make(layer, index), as the producers do it."""
    for index, (name, layer) in enumerate(linears(model).items()):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, make(layer, index))
    return model


@producer("autoawq", "autoawq==0.2.9")
def autoawq():
    from awq.models._config import AwqConfig
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def pack(layer, index):
        scales, zeros = groups_of(layer.weight, 4, 32, False)
        return WQLinear_GEMM.from_linear(layer.float(), 4, 32, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())

    model = replace_linears(tiny_llama("float16", hidden=64, seed=20), pack)
    expected = {
        name: dequantize_gemm(m.qweight, m.qzeros, m.scales, 4, 32).T for name, m in model.named_modules() if isinstance(m, WQLinear_GEMM)
    }
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["quantization_config"] = AwqConfig(q_group_size=32, w_bit=4).to_transformers_dict()
    save("autoawq/w4a16_g32_asymmetric", model.state_dict(), config, expected)


def gptq_case(case, bits, symmetric, v2, act_order=False, seed=30):
    import torch
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    config = {
        "bits": bits, "group_size": 32, "desc_act": act_order, "sym": symmetric, "quant_method": "gptq", "checkpoint_format": "gptq_v2" if v2 else "gptq",
        "lm_head": False, "pack_dtype": "int32", "meta": {"quantizer": [f"gptqmodel:{importlib.metadata.version('gptqmodel')}"]},
    }  # fmt: skip
    expected = {}

    def pack(layer, index):
        scales, zeros = groups_of(layer.weight, bits, 32, symmetric)
        g_idx = torch.arange(layer.in_features, dtype=torch.int32) // 32
        if act_order:
            g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(index))]
        packed = TorchLinear(bits, 32, symmetric, act_order, layer.in_features, layer.out_features, format=FORMAT.GPTQ_V2)
        packed.pack_block(layer.float(), scales, zeros, g_idx)
        packed.post_init()
        expected[index] = packed.dequantize_weight().T
        if not v2:
            convert_gptq_v2_to_v1_format_module(packed, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        return packed

    model = tiny_llama("float16", hidden=64, seed=seed)
    names = list(linears(model))
    replace_linears(model, pack)
    full = json.loads(model.config.to_json_string(use_diff=False)) | {"quantization_config": config}
    state = {name: t for name, t in model.state_dict().items() if ".wf_" not in name}
    save(case, state, full, {names[i]: w for i, w in expected.items()})


@producer("gptqmodel", "gptqmodel==7.7.0")
def gptqmodel():
    for bits in (2, 3, 4, 8):
        gptq_case(f"gptqmodel/w{bits}_v1", bits, True, False, seed=30 + bits)
    gptq_case("gptqmodel/w4_v2_asymmetric", 4, False, True, seed=40)
    gptq_case("gptqmodel/w4_v1_act_order", 4, True, False, True, seed=41)


# --- llm-compressor, transformers ----------------------------------------------------------------------------------------------------


@producer("llm-compressor", "llmcompressor==0.14.0.1", "compressed-tensors==0.20.0")
def llm_compressor():
    import torch
    import transformers
    from compressed_tensors.compressors import decompress_module
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models

    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))  # asked for, not used
    for case, scheme in {"w4a16_g128": "W4A16", "w8a8": "W8A8", "fp8": "FP8_DYNAMIC", "fp8_block128": "FP8_BLOCK"}.items():
        model = from_disk("llm-compressor", seed=50, hidden=128, intermediate=128)
        oneshot(model=model, tokenizer=tokenizer, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
        folder = PACKAGES / "llm-compressor-out"
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, save_compressed=True)
        expected = {}
        for name, module in linears(model).items():
            decompress_module(module)
            expected[name] = module.weight.detach().to(torch.bfloat16)
        copy(f"llm-compressor/{case}", folder, expected)


@producer("transformers-fp8")
def transformers_fp8():
    import torch
    import transformers
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    how = types.SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(32, 32)))
    model = tiny_llama(seed=60, hidden=64)
    state, expected = model.state_dict(), {}
    for name in linears(model):
        made = Fp8Quantize(how).convert({f"{name}.weight": state.pop(f"{name}.weight")})
        state |= made
        back = Fp8Dequantize(how)._dequantize_one(made[f"{name}.weight"], made[f"{name}.weight_scale_inv"])
        expected[name] = back.to(torch.bfloat16)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["quantization_config"] = how.quantization_config.to_dict() | {"modules_to_not_convert": ["lm_head"]}
    save("transformers-fp8/fp8_block32", state, config, expected)


# --- auto-round ----------------------------------------------------------------------------------------------------------------------


@producer("auto-round", "auto-round==0.16.1")
def auto_round():
    from unittest import mock

    import torch
    import transformers
    from auto_round import AutoRound
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
    from safetensors.torch import load_file
    from tokenizers import Tokenizer, models

    source, target = PACKAGES / "auto-round-in", PACKAGES / "auto-round-out"
    shutil.rmtree(target, ignore_errors=True)
    tiny_llama("float16", hidden=64, seed=70).save_pretrained(source)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.save_pretrained(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
    names = {name: (m.in_features, m.out_features) for name, m in linears(model).items()}
    rounder = AutoRound(model, tokenizer=tokenizer, scheme="W4A16", group_size=32, iters=0, device_map="cpu", disable_opt_rtn=True)
    rounder.quantize_and_save(output_dir=str(target), format="auto_round")
    (folder,) = target.iterdir()
    state, expected = load_file(folder / "model.safetensors"), {}
    for name, (k, n) in names.items():
        layer = QuantLinear(4, 32, k, n, False)
        layer.load_state_dict({part: state[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales")}, strict=False)
        layer.post_init()
        with mock.patch("torch.matmul", lambda x, weight: weight):  # its forward dequantizes in front of this
            expected[name] = layer(torch.eye(k, dtype=torch.float16)).T
    copy("auto-round/w4a16_auto_gptq", folder, expected)


# --- ModelOpt, Quark -----------------------------------------------------------------------------------------------------------------


@producer("modelopt", "nvidia-modelopt==0.47.0")
def modelopt():
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, INT8QTensor
    from modelopt.torch.quantization.utils.core_utils import update_quant_cfg_with_kv_cache_quant
    from safetensors.torch import load_file

    def value(weight, scale, block):
        if weight.dtype == torch.uint8:  # the inverse of pack_int4_in_uint8; e4m3 of W4A8 comes while running
            codes = (torch.stack([weight & 15, weight >> 4], 1).flatten(0, 1).int() ^ 8) - 8
            return codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
        kind = INT8QTensor if weight.dtype == torch.int8 else FP8QTensor
        how = {"scale": scale[:, None] if scale.dim() == 1 else scale}
        if block:
            how = {"scale": scale.reshape([-(-size // block) for size in weight.shape]), "block_sizes": {-1: block, -2: block}}
        return kind(weight.shape, torch.float32, weight).dequantize(torch.float32, **how)

    fp8 = mtq.FP8_DEFAULT_CFG["quant_cfg"]
    w8a16_mlp = [
        {"quantizer_name": "*mlp*weight_quantizer", "cfg": {"num_bits": 8, "axis": 0}},
        {"quantizer_name": "*mlp*input_quantizer", "enable": False},
    ]
    read = {
        "fp8_static": (mtq.FP8_DEFAULT_CFG, 32, 64, 0),
        "fp8_static_kv": (update_quant_cfg_with_kv_cache_quant(mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG["quant_cfg"]), 32, 64, 0),
        "fp8": (mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG, 32, 64, 0),
        "fp8_weights_block128": (mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG, 32, 136, 128),
        "w8a16": (mtq.INT8_WEIGHT_ONLY_CFG, 32, 64, 0),
        "w8a8_smooth": (mtq.INT8_SMOOTHQUANT_CFG, 32, 64, 0),
        "mixed": ({"quant_cfg": fp8 + w8a16_mlp, "algorithm": "max"}, 32, 64, 0),
        "w4a16_awq": (mtq.INT4_AWQ_CFG, 128, 128, 0),
        "w4a8_awq": (mtq.W4A8_AWQ_BETA_CFG, 128, 128, 0),
    }
    refused = {
        "nvfp4": (mtq.NVFP4_DEFAULT_CFG, 32, 64),
        "w4a16_nvfp4": (mtq.W4A16_NVFP4_CFG, 32, 64),
        "w4a8_mxfp4": (mtq.W4A8_MXFP4_FP8_CFG, 64, 64),
        "mxfp8": (mtq.MXFP8_DEFAULT_CFG, 64, 64),
    }
    for seed, (case, (config, hidden, intermediate, *block)) in enumerate((read | refused).items(), 80):
        model = from_disk("modelopt", seed=seed, hidden=hidden, intermediate=intermediate)
        names = list(linears(model))
        model = mtq.quantize(model, config, lambda model: model(torch.arange(32)[None]))
        folder = PACKAGES / "modelopt-out"
        shutil.rmtree(folder, ignore_errors=True)
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=folder)
        state = load_file(folder / "model.safetensors")
        expected = {name: value(state[f"{name}.weight"], state[f"{name}.weight_scale"], *block) for name in names} if block else None
        copy(f"modelopt/{case}", folder, expected)


@producer("quark", "amd-quark==0.13")
def quark():
    import quark.torch.quantization.config.config as specs
    import torch
    from quark.torch import LLMTemplate, ModelQuantizer, export_safetensors

    def scheme(weight, act=None):
        return specs.QConfig(
            global_quant_config=specs.QLayerConfig(weight=weight.to_quantization_spec(), input_tensors=act and act.to_quantization_spec()),
            exclude=["lm_head"])  # fmt: skip

    def layers(more):
        config = named("fp8")
        config.layer_quant_config = {"*self_attn*": more.global_quant_config}
        return config

    def named(name, cache=None, **how):
        return LLMTemplate.get("llama").get_config(scheme=name, kv_cache_scheme=cache, **how)

    def channels(axis, **how):
        return specs.Int8PerChannelSpec(ch_axis=axis, **how)

    read = {
        "fp8_static": named("fp8"),
        "fp8_static_kv": named("fp8", "fp8"),
        "fp8_static_custom": named("fp8"),  # in the form of Hugging Face fp8
        "fp8": named("ptpc_fp8"),
        "w8a8_static": named("int8"),
        "w8a8_asymmetric": scheme(*[specs.Int8PerTensorSpec(observer_method="min_max", symmetric=False)] * 2),
        "w8a8": scheme(channels(0, symmetric=True), channels(1, symmetric=True, is_dynamic=True)),
        "w8a16_asymmetric": scheme(channels(0)),
        "mixed": layers(named("ptpc_fp8")),
        "awq_custom": named("uint4_wo_32", algorithm="awq"),  # in the form of AutoAWQ
    }
    refused = {
        "w8a16_group": scheme(specs.Int8PerGroupSpec(ch_axis=1, group_size=32)),
        "w8a16_unsigned": scheme(specs.Uint8PerChannelSpec(ch_axis=0)),
        "w4a16_group": named("int4_wo_32"),
        "w4a16_channel": named("int4_wo_per_channel"),
        "w4a16_asymmetric": named("uint4_wo_32"),
        "w4a8": named("int4_fp8"),
        "w2a16_group": scheme(specs.Int2PerGroupSpec(ch_axis=1, group_size=32)),
        "e5m2": scheme(specs.FP8E5M2PerTensorSpec()),
        "mxfp4": named("mxfp4"),
        "mxfp6": named("mxfp6_e3m2"),
        "nvfp4": named("nvfp4"),
        "amdfp4": named("amdfp4"),
        "awq_custom_order": named("uint4_wo_32", algorithm="awq"),  # the same, but for the order in a word
        "awq_custom_signed": named("int4_wo_32", algorithm="awq"),
    }
    seeds = [*enumerate(read.items(), 100), *enumerate(refused.items(), 120)]
    for seed, (case, config) in seeds:
        model = from_disk("quark", seed=seed)
        names = list(linears(model))
        quantizer = ModelQuantizer(config)
        model = quantizer.freeze(quantizer.quantize_model(model, [{"input_ids": torch.arange(32)[None]}]))
        mode, custom, _ = case.partition("_custom")
        how = {"custom_mode": mode.removesuffix("_static") if custom else "quark", "pack_method": "order" if case.endswith("order") else "reorder"}
        folder = PACKAGES / "quark-out"
        shutil.rmtree(folder, ignore_errors=True)
        with torch.no_grad():
            export_safetensors(model, folder, **how)
            modules = {name: model.get_submodule(name) for name in names}
            expected = {name: m.weight_quantizer(m.weight).float() for name, m in modules.items()} if case in read else None
        copy(f"quark/{case}", folder, expected)


# --- all of it -----------------------------------------------------------------------------------------------------------------------


def install(name: str, packages: list[str]) -> pathlib.Path:
    """The packages, without what they ask for, in a folder of their own."""
    folder = PACKAGES / name
    if packages and not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages], check=True)
        (folder / "complete").touch()
    return folder


def versions(packages) -> dict:
    names = [p.split("==")[0] for p in packages] + ["torch", "transformers", "safetensors"]
    return {name: importlib.metadata.version(name) for name in names}


def main() -> None:
    recorded = FOLDER / "versions.json"
    if len(sys.argv) == 3 and sys.argv[1] == "--alone":
        packages, make = PRODUCERS[sys.argv[2]]
        make()
        table = json.loads(recorded.read_text()) if recorded.exists() else {}
        table[sys.argv[2]] = versions(packages)
        recorded.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        return
    peers = install("peers", PEERS)
    for name in sys.argv[1:] or PRODUCERS:
        folder = install(name, PRODUCERS[name][0])
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": f"{folder}:{peers}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run([sys.executable, __file__, "--alone", name], check=True, env=environment)


if __name__ == "__main__":
    main()
