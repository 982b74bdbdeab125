#!/usr/bin/env python3
"""Writes the tiny checkpoints of this folder, and what their weights are.

    python3 tests/golden/make_golden.py        (from anywhere; the output is the same on every machine)

Each case is FORMAT/CASE/{config.json,model.safetensors} with one or more modules, and FORMAT/CASE.expected.safetensors with
MODULE.f32 and MODULE.f16, the dequantized weights [N,K]. Everything is done by the most literal route: a stream of codes is
one big integer, a weight is one formula. Nothing here is shared with the C++ codecs. Needs only Python.
"""
import json
import os
import struct

HERE = os.path.dirname(os.path.abspath(__file__))
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AWQ: nibble p holds column ORDER[p]


class Random:
    """A small generator that does not change with the Python version."""

    def __init__(self, seed):
        self.state = seed * 2654435761 % 2**32 or 1

    def below(self, bound):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound


# --- numbers and files -------------------------------------------------------------------------------------------------------

def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def encode(dtype, x):
    """One element as bytes; bf16 values are chosen exact, so cutting the f32 is enough."""
    if dtype == "BF16":
        assert struct.pack("<f", x)[:2] == b"\0\0"
        return struct.pack("<f", x)[2:]
    return struct.pack({"F16": "<e", "F32": "<f", "U8": "<B", "I8": "<b", "I32": "<i", "I64": "<q", "F8_E4M3": "<B"}[dtype], x)


def save(path, tensors):
    """tensors: (name, dtype, shape, flat list)."""
    header, body = {}, b""
    for name, dtype, shape, values in tensors:
        data = b"".join(encode(dtype, v) for v in values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def save_case(name, config, modules, file_name="config.json"):
    """modules: name → (tensors as (suffix, dtype, shape, values), weights[n][k] as exact Python floats)."""
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    if file_name == "config.json":
        config = {"model_type": "golden"} | ({"quantization_config": config} if config else {})
    with open(os.path.join(folder, file_name), "w") as file:
        json.dump(config, file, indent=1)
        file.write("\n")
    stored, expected = [], []
    for module, (tensors, weights) in modules.items():
        stored += [(f"{module}.{suffix}", *rest) for suffix, *rest in tensors]
        flat = [f32(w) for row in weights for w in row]
        shape = [len(weights), len(weights[0])]
        expected += [(f"{module}.f32", "F32", shape, flat), (f"{module}.f16", "F16", shape, flat)]
    save(os.path.join(folder, "model.safetensors"), stored)
    save(os.path.join(HERE, name + ".expected.safetensors"), expected)


# --- packing -----------------------------------------------------------------------------------------------------------------

def signed(word):
    return word - 2**32 if word >= 2**31 else word


def stream(codes, bits):
    """Code i at bits [bits·i, bits·i + bits) of a little-endian integer, cut into 32-bit words."""
    number = sum(code << (bits * i) for i, code in enumerate(codes))
    return [signed(number >> (32 * w) & 0xFFFFFFFF) for w in range((len(codes) * bits + 31) // 32)]


def padded(codes, bits):
    """⌊32/bits⌋ codes a word."""
    per = 32 // bits
    return [word for i in range(0, len(codes), per) for word in stream(codes[i:i + per], bits)[:1]]


def awq_words(columns):
    return [signed(sum(columns[i + ORDER[p]] << (4 * p) for p in range(8))) for i in range(0, len(columns), 8)]


def columns_of(rows):
    return [list(column) for column in zip(*rows)]


def flat(rows):
    return [value for row in rows for value in row]


def down(columns):
    """Columns of words → the row-major tensor they form."""
    return flat(columns_of(columns))


# --- random layers -----------------------------------------------------------------------------------------------------------

def random_layer(seed, n, k, groups, bits, dtype):
    random = Random(seed)
    codes = [[random.below(2**bits) for _ in range(k)] for _ in range(n)]
    steps = 2**7 if dtype == "BF16" else 2**10
    scales = [[(steps + random.below(steps)) / steps / 2**(6 + random.below(3)) for _ in range(groups)] for _ in range(n)]
    if dtype == "F32":
        scales = [[f32(s * (1 + 1 / 3)) for s in row] for row in scales]
    zeros = [[random.below(2**bits) for _ in range(groups)] for _ in range(n)]
    bias = [(random.below(64) - 32) / 16 for _ in range(n)]
    return random, codes, scales, zeros, bias


def weights(codes, scales, zeros, group_of):
    return [[(q - zeros[n][group_of[k]]) * scales[n][group_of[k]] for k, q in enumerate(row)] for n, row in enumerate(codes)]


def natural(k, g):
    return [i // g for i in range(k)]


def shuffled(k, g, random):
    order = natural(k, g)
    for i in range(k - 1, 0, -1):
        j = random.below(i + 1)
        order[i], order[j] = order[j], order[i]
    return order


# --- formats -----------------------------------------------------------------------------------------------------------------

def awq(name, seed, n, k, g, dtype="F16", symmetric=False):
    groups = k // g
    _, codes, scales, zeros, bias = random_layer(seed, n, k, groups, 4, dtype)
    if symmetric:
        zeros = [[8] * groups for _ in range(n)]
    tensors = [("qweight", "I32", [k, n // 8], flat(awq_words(row) for row in columns_of(codes))),
               ("qzeros", "I32", [groups, n // 8], flat(awq_words(row) for row in columns_of(zeros))),
               ("scales", dtype, [groups, n], flat(columns_of(scales))),
               ("bias", dtype, [n], bias)]
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": -1 if groups == 1 else g,
              "zero_point": not symmetric, "modules_to_not_convert": None}
    save_case(f"awq/{name}", config, {"model.proj": (tensors, weights(codes, scales, zeros, natural(k, g)))})


def gptq(name, seed, bits, k=64, g=32, v2=False, symmetric=True, act_order=False, damaged=False, g_idx=True, dtype="F16"):
    n, groups = {2: 16, 3: 32, 4: 8, 8: 8}[bits], -(-k // g)  # the fewest columns that fill words
    random, codes, scales, zeros, _ = random_layer(seed, n, k, groups, bits, dtype)
    mask = 2**bits - 1
    if symmetric:
        zeros = [[2**(bits - 1)] * groups for _ in range(n)]
    elif not damaged:  # where v1 loses nothing
        zeros = [[max(z, 1) for z in row] for row in zeros]
    group_of = shuffled(k, g, random) if act_order else natural(k, g)
    fields = [[z if v2 else (z - 1) & mask for z in row] for row in columns_of(zeros)]
    words = [stream(row, bits) for row in fields]
    if damaged:  # group 0, columns 0…7 as AutoGPTQ writes z = 7 0 5 9 1 15 3 8: the borrow of 0 − 1 fills the word
        words[0][0] = signed(0xFFFFFFF6)
        zeros = [[([7] + [0] * 7)[i] if j == 0 and i < 8 else z for j, z in enumerate(row)] for i, row in enumerate(zeros)]
    tensors = [("qweight", "I32", [k * bits // 32, n], down(stream(row, bits) for row in codes)),
               ("qzeros", "I32", [groups, n * bits // 32], flat(words)),
               ("scales", dtype, [groups, n], flat(columns_of(scales)))]
    if g_idx:
        tensors.append(("g_idx", "I32", [k], group_of))
    config = {"quant_method": "gptq", "bits": bits, "group_size": g, "desc_act": act_order, "sym": symmetric,
              "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    save_case(f"gptq/{name}", config, {"model.proj": (tensors, weights(codes, scales, zeros, group_of))})


def compressed(name, seed, bits, n=12, k=64, g=32, strategy="group", symmetric=True, act_order=False, legacy=False, dtype="BF16"):
    groups = k // g if strategy == "group" else 1
    rows = 1 if strategy == "tensor" else n
    random, codes, scales, zeros, _ = random_layer(seed, n, k, groups, bits, dtype)
    if symmetric:
        zeros = [[2**(bits - 1)] * groups for _ in range(n)]
    scales = (scales[:rows] * n)[:n]
    group_of = (shuffled if act_order else lambda k, g, _: natural(k, g))(k, g if groups > 1 else k, random)
    pack = padded if legacy else stream
    packed = [pack(row, bits) for row in codes]
    tensors = [("weight_packed", "I32", [n, len(packed[0])], flat(packed)),
               ("weight_scale", dtype, [1] if strategy == "tensor" else [n, groups], flat(scales[:rows]))]
    if not symmetric:
        zero_words = [pack(column, bits) for column in columns_of(zeros)]
        tensors.append(("weight_zero_point", "I32", [len(zero_words[0]), groups], down(zero_words)))
    if act_order:
        tensors.append(("weight_g_idx", "I32", [k], group_of))
    tensors.append(("weight_shape", "I64", [2], [n, k]))
    args = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False,
            "group_size": g if strategy == "group" else None, "actorder": "group" if act_order else None}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}},
              "ignore": ["lm_head"]}
    save_case(f"compressed-tensors/{name}", config, {"model.proj": (tensors, weights(codes, scales, zeros, group_of))})


def ct_acts(kind, static, symmetric=True, group=None):
    strategy = "group" if group else "tensor" if static else "token"
    args = {"num_bits": 8, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": not static}
    return args | ({"group_size": group} if group else {})


def int_quantized(name, seed, strategy, n=10, k=48, g=16, symmetric=True, dynamic=True, dtype="BF16", act_zero=None):
    groups = k // g if strategy == "group" else 1
    rows = 1 if strategy == "tensor" else n
    _, codes, scales, zeros, bias = random_layer(seed, n, k, groups, 8, dtype)
    codes = [[q - 128 for q in row] for row in codes]
    zeros = [[0 if symmetric else z - 128 for z in row] for row in zeros]
    scales = (scales[:rows] * n)[:n]
    zeros = (zeros[:rows] * n)[:n]
    shape = [1] if strategy == "tensor" else [n, groups]
    tensors = [("weight", "I8", [n, k], flat(codes)), ("weight_scale", dtype, shape, flat(scales[:rows])),
               ("bias", dtype, [n], bias)]
    if not symmetric:
        tensors.append(("weight_zero_point", "I8", shape, flat(zeros[:rows])))
    if not dynamic:
        tensors.append(("input_scale", "F32", [1], [0.0625]))
        if act_zero is not None:
            tensors.append(("input_zero_point", "I8", [1], [act_zero]))
    args = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy, "dynamic": False,
            "group_size": g if strategy == "group" else None}
    acts = ct_acts("int", not dynamic, symmetric=act_zero is None)
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": acts}}, "ignore": []}
    save_case(f"int-quantized/{name}", config,
              {"model.proj": (tensors, weights(codes, scales, zeros, natural(k, g if groups > 1 else k)))})


def e4m3(code):
    """One sign bit, four of exponent with a bias of 7, three of fraction; no infinities."""
    sign, exponent, fraction = -1 if code >> 7 else 1, code >> 3 & 15, code & 7
    assert code & 0x7F != 0x7F
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2**(exponent - 7))


def fp8(name, seed, config, rows, cols, shape, n=10, k=48, suffix="weight_scale", dtype="F32", block=None, static=None,
        file_name="config.json"):
    """rows × cols scales, stored in `shape`; `block` is what shares one. static: the suffix and shape of the activations'."""
    random = Random(seed)
    codes = [[random.below(128) % 127 + 128 * random.below(2) for _ in range(k)] for _ in range(n)]  # 0x7f and 0xff are NaN
    steps = 2**7 if dtype == "BF16" else 2**10
    scales = [[f32((steps + random.below(steps)) / steps / 2**(6 + random.below(3)) * (1 if dtype == "BF16" else 4 / 3))
               for _ in range(cols)] for _ in range(rows)]
    bn, bk = block or (-(-n // rows), -(-k // cols))
    tensors = [("weight", "F8_E4M3", [n, k], flat(codes)), (suffix, dtype, shape, flat(scales)),
               ("bias", "F16", [n], [(random.below(64) - 32) / 16 for _ in range(n)])]
    if static:
        tensors.append((static[0], "F32", static[1], [0.015625]))
    values = [[e4m3(q) * scales[i // bn][j // bk] for j, q in enumerate(row)] for i, row in enumerate(codes)]
    save_case(name, config, {"model.proj": (tensors, values)}, file_name)


def ct_fp8(strategy, acts, block=None):
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, "group_size": None,
            "block_structure": block}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": acts}}, "ignore": []}


def modelopt(algorithm, **more):
    return {"producer": {"name": "modelopt", "version": "0.33.0"},
            "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, **more, "exclude_modules": ["lm_head"]}}


def modelopt_int4(name, seed, config, n=12, k=64, g=32, dtype="F32", fp8_acts=False, file_name="config.json"):
    random, codes, scales, _, bias = random_layer(seed, n, k, k // g, 4, dtype)
    signed_codes = [[q - 8 for q in row] for row in codes]
    pairs = [[low & 15 | (high & 15) << 4 for low, high in zip(*signed_codes[i:i + 2])] for i in range(0, n, 2)]
    tensors = [("weight", "U8", [n // 2, k], flat(pairs)), ("weight_scale", dtype, [n, k // g], flat(scales)),
               ("pre_quant_scale", "BF16", [k], [(128 + random.below(128)) / 128 for _ in range(k)]), ("bias", "F16", [n], bias)]
    if fp8_acts:
        tensors += [("weight_scale_2", "F32", [], [f32(0.0002)]), ("input_scale", "F32", [], [0.015625])]
    save_case(f"modelopt-int4/{name}", config,
              {"model.proj": (tensors, weights(signed_codes, scales, [[0] * (k // g)] * n, natural(k, g)))}, file_name)


def nibble_codes(name, seed, scheme, bits, n=10, k=64, g=32, offsets=True, filter=None):
    """filter: of a convolution, whose K is in the order kh, kw, channel; its elements share the groups of the channels."""
    channels = k // (filter[0] * filter[1]) if filter else k
    groups, group_of = channels // g, [i % channels // g for i in range(k)]
    random, codes, scales, _, bias = random_layer(seed, n, k, groups, bits, "F16")
    floats = [[(random.below(256) - 128) / 64 for _ in range(groups)] for _ in range(n)]
    sizes = [n, channels, *filter] if filter else [n, k]
    tensors = [("weight_codes", "I32", [n, (k * bits + 31) // 32], flat([stream(row, bits) for row in codes])),
               ("weight_scale", "F16", [n, groups], flat(scales)),
               ("weight_offset" if offsets else "weight_zero", "F16", [n, groups], flat(floats)),
               ("weight_scheme", "U8", [len(scheme)], list(scheme.encode("ascii"))),
               ("weight_shape", "I64", [len(sizes)], sizes), ("bias", "F16", [n], bias)]
    w = [[q * scales[row][i] + floats[row][i] if offsets else (q - floats[row][i]) * scales[row][i]
          for i, q in zip(group_of, codes[row])] for row in range(n)]
    save_case(f"nibble-codes/{name}", {"quant_method": "nibble-codes", "modules_to_not_convert": []}, {"model.proj": (tensors, w)})


def mxfp4(name, seed, n=6, k=64):
    random, values = Random(seed), [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = [[random.below(16) for _ in range(k)] for _ in range(n)]
    exponents = [[118 + random.below(12) for _ in range(k // 32)] for _ in range(n)]
    pairs = [[low | high << 4 for low, high in zip(row[::2], row[1::2])] for row in codes]
    tensors = [("blocks", "U8", [n, k // 32, 16], flat(pairs)), ("scales", "U8", [n, k // 32], flat(exponents)),
               ("bias", "BF16", [n], [(random.below(64) - 32) / 16 for _ in range(n)])]
    w = [[(-1 if q & 8 else 1) * values[q & 7] * 2.0**(exponents[row][i // 32] - 127) for i, q in enumerate(codes[row])] for row in range(n)]
    save_case(f"mxfp4/{name}", {"quant_method": "mxfp4"}, {"model.proj": (tensors, w)})


def smoothquant(name, seed, n=10, k=48, int8_output=True):
    random = Random(seed)
    codes = [[random.below(255) - 127 for _ in range(k)] for _ in range(n)]
    a = f32(0.0007)
    tensors = [("weight", "I8", [n, k], flat(codes)), ("a", "F32", [], [a])]
    if int8_output:
        tensors += [("b", "F32", [], [0.5]), ("bias", "I8", [1, n], [random.below(255) - 127 for _ in range(n)])]
    else:
        tensors.append(("bias", "F32", [1, n], [(random.below(64) - 32) / 16 for _ in range(n)]))
    save_case(f"smoothquant/{name}", None, {"model.proj": (tensors, [[q * a for q in row] for row in codes])})


def main():
    awq("g128", 1, n=8, k=256, g=128)
    awq("g64_bf16", 2, n=16, k=128, g=64, dtype="BF16")
    awq("channel", 3, n=16, k=40, g=40)
    awq("symmetric", 4, n=8, k=64, g=32, symmetric=True)

    for bits in (2, 3, 4, 8):
        gptq(f"v1_{bits}bit", 10 + bits, bits)
        gptq(f"v2_{bits}bit", 20 + bits, bits, v2=True)
    gptq("v1_4bit_act_order", 30, 4, act_order=True)
    gptq("v1_4bit_asymmetric", 31, 4, symmetric=False)
    gptq("v2_3bit_asymmetric", 32, 3, symmetric=False, v2=True)
    gptq("v1_4bit_damaged", 33, 4, symmetric=False, damaged=True)
    gptq("v1_4bit_ragged_f32", 34, 4, k=72, g=32, g_idx=False, dtype="F32")

    for bits in (4, 8):
        for symmetric in (True, False):
            for strategy in ("group", "channel"):
                kind = "symmetric" if symmetric else "asymmetric"
                compressed(f"{bits}bit_{kind}_{strategy}", 40 + bits + 2 * symmetric + (strategy == "group"), bits,
                           strategy=strategy, symmetric=symmetric)
    compressed("4bit_act_order", 60, 4, act_order=True)
    compressed("4bit_tensor_f32", 61, 4, k=50, strategy="tensor", dtype="F32")
    compressed("3bit_dense", 62, 3, symmetric=False)
    compressed("3bit_padded", 63, 3, symmetric=False, legacy=True)

    int_quantized("channel_dynamic", 70, "channel")
    int_quantized("tensor_static", 71, "tensor", dynamic=False)
    int_quantized("group_asymmetric_f16", 72, "group", symmetric=False, dtype="F16")
    int_quantized("channel_static_zero", 73, "channel", dynamic=False, act_zero=-7)

    ct = "float-quantized/ct_"
    fp8(ct + "tensor_static", 80, ct_fp8("tensor", ct_acts("float", True)), 1, 1, [1], dtype="BF16", static=("input_scale", [1]))
    fp8(ct + "channel_token", 81, ct_fp8("channel", ct_acts("float", False)), 10, 1, [10, 1], dtype="BF16")
    fp8(ct + "block", 82, ct_fp8("block", ct_acts("float", False, group=16), [8, 16]), 3, 3, [3, 3], n=20, block=(8, 16))
    fp8("float-quantized/modelopt_fp8", 83, modelopt("FP8"), 1, 1, [], static=("input_scale", []),
        file_name="hf_quant_config.json")
    fp8("float-quantized/modelopt_channel", 84, {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        10, 1, [10])
    fp8("float-quantized/modelopt_blocks", 85, modelopt("FP8_PB_WO"), 1, 2, [1, 1, 2, 1], n=8, k=136, block=(128, 128),
        file_name="hf_quant_config.json")
    fp8("float-quantized/fbgemm", 86, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, 10, 1, [10, 1])
    hf = {"quant_method": "fp8", "fmt": "e4m3"}
    fp8("float-quantized/hf_tensor_static", 87, hf | {"activation_scheme": "static"}, 1, 1, [], static=("input_scale", []))
    fp8("fp8/blocks_ragged", 88, hf | {"activation_scheme": "dynamic", "weight_block_size": [8, 16]}, 3, 3, [3, 3], n=20, k=40,
        suffix="weight_scale_inv", block=(8, 16))
    fp8("fp8/tensor_static", 89, hf | {"activation_scheme": "static", "weight_block_size": None}, 1, 1, [],
        suffix="weight_scale_inv", static=("activation_scale", []))

    modelopt_int4("w4a16", 92, modelopt("W4A16_AWQ", group_size=32, has_zero_point=False, pre_quant_scale=True), dtype="BF16",
                  file_name="hf_quant_config.json")
    modelopt_int4("w4a8", 93, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, fp8_acts=True)

    nibble_codes("4bit_offsets", 94, "u4og32", 4)
    nibble_codes("3bit_float_zeros", 95, "u3fg32", 3, offsets=False)
    nibble_codes("4bit_image_channels", 96, "u4oci16", 4, k=96, g=16, filter=(3, 1))

    mxfp4("gpt_oss", 64)
    smoothquant("int8_output", 90)
    smoothquant("float_output", 91, int8_output=False)


if __name__ == "__main__":
    main()
