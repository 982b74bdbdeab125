#!/usr/bin/env python3
"""The table of a benchmark on a GPU, as docs/render.py makes it of a JSON. usage: gpu_table_test.py RENDER_PY"""

import importlib.util
import sys

spec = importlib.util.spec_from_file_location("render", sys.argv[1])
render = importlib.util.module_from_spec(spec)
spec.loader.exec_module(render)


def result(n, k, m, act, us, baselines, **more):
    return {"name": f"layer{n}", "n": n, "k": k, "m": m, "scheme": "u4b8g128", "a_dtype": act, "kernel": "a__b", "median_us": us, "gbytes_per_s": 2000,
            "ceiling_gbytes_per_s": 4000, "roofline_percent": 50.0, "baselines": baselines, **more}


DATA = {
    "device": {"gpu": "NVIDIA X1", "read_gbytes_per_s": 4000, "f16_gflops": 690000},
    "baseline": "cuBLAS 13.1.0", "commit": "abc", "date": "2026-01-01T00:00:00Z",
    "results": [
        result(4096, 1024, 1, "f16", 5.0, {"cublas_f16": 12.5}),
        result(4096, 1024, 8, "f16", 8.0, {"cublas_f16": 12.0}),
        result(4096, 1024, 8, "f16", 99.0, {"cublas_f16": 12.0}, chosen=False),
        result(64, 64, 1, "bf16", 1.0, {}),
    ],
}

text = render.gpu_modes(DATA)
lines = text.splitlines()
assert lines[2] == "| N×K | floor | M = 1 | M = 8 |", lines
assert lines[4] == "| 4096×1024 | 2.5 | 5.0 · 50 % · **2.50×** | 8.0 · 50 % · **1.50×** |", lines
assert "`u4b8g128` × f16" in text and "`u4b8g128` × bf16" in text and "| 64×64 | 0.5 | 1.0 · 50 % |" in text, text
assert "NVIDIA X1" in lines[-1] and "690 TFLOP/s" in lines[-1], lines
assert "./dev gpu" in render.gpu_modes(None)

# Isolated calls have tables of their own, and so have those of a chain.
isolated = render.gpu_modes({**DATA, "isolated": [result(4096, 1024, 1, "f16", 10.0, {}, calls="isolated")]})
assert "`u4b8g128` × f16, calls isolated:\n\n| N×K | floor | M = 1 |" in isolated and "| 4096×1024 | 5.0 | 10.0 · 50 % |" in isolated, isolated
assert isolated.startswith(text[:text.index("NVIDIA")])
chain = render.gpu_modes({**DATA, "chain": [result(4096, 1024, 1, "f16", 10.0, {}, calls="chain")]})
assert "`u4b8g128` × f16, calls in a chain:\n\n| N×K | floor | M = 1 |" in chain, chain
kept = list(render.survey.whole(render.survey.compact({
    "schema": 1, "device": DATA["device"], "results": [{**r, "calls": r.get("calls", "back-to-back")} for r in DATA["results"][:1]]
    + [result(4096, 1024, 1, "f16", 10.0, {}, calls="isolated")]})))  # fmt: skip
assert [row.get("calls") for row in kept] == [None, "isolated"] and len(render.survey.called(kept)) == 1, kept

# What most rows have stands once; a row with something else, or without, says so.
every, short = render.survey.shortened([{"name": "o", "m": m, "calls": "isolated"} for m in (1, 2, 3)] + [{"name": "o", "m": 4}])
assert every == {"name": "o", "calls": "isolated"} and short == [{"m": 1}, {"m": 2}, {"m": 3}, {"calls": None, "m": 4}], (every, short)
assert list(render.survey.whole({"every": every, "rows": short}))[2:] == [{"name": "o", "calls": "isolated", "m": 3}, {"name": "o", "m": 4}]

# A decoder's block: a row for each scheme, M and way of calling, with its products and the whole, whose operations are those of its products.
SIZES = {"hidden": 8, "intermediate": 16, "heads": 4, "kv_heads": 2, "head_dim": 2}
parts = [result(8, 8, 1, "f16", us, {}, name=name, block=SIZES) for name, us in [("qkv", 1.0), ("o", 2.0), ("gate_up", 3.0), ("down", 4.0), ("block", 9.5)]]
lines = render.gpu_block({**DATA, "results": parts, "chain": parts}).splitlines()
assert lines[0] == "| scheme | M | calls | qkv | o | gate_up | down | block |", lines
assert lines[2:4] == [f"| `u4b8g128` | 1 | {calls} | 1.0 | 2.0 | 3.0 | 4.0 | 9.5 · 50 % |" for calls in ("back to back", "in a chain")], lines
assert "./dev gpu" in render.gpu_block(None)
survey = render.survey.compact({"schema": 1, "device": DATA["device"], "results": parts})
assert [render.survey.operations(row) for row in render.survey.whole(survey)] == [128] * 4 + [2 * 8 * (16 + 8 + 48)], survey

# The fastest kernel of every layer and M, chosen or not, of several files; one kernel of them by its name.
FEW, MANY = "linear_any_f16_any__cuda_sm90_m8n64k128", "linear_any_f16_any__cuda_sm90_wgmma_m64n256"
few = {**DATA, "results": [result(512, 256, 8, "f16", 6.0, {"cublas_f16": 12.0}, kernel=MANY, chosen=True),
                           result(512, 256, 8, "f16", 4.0, {"cublas_f16": 12.0}, kernel=FEW, chosen=False)]}
many = {**DATA, "commit": "def", "results": [result(512, 256, 64, "f16", 10.0, {"cublas_f16": 5.0}, kernel=MANY)]}
lines = render.gpu_gemm(few, many).splitlines()
assert lines[2] == "| 512×256 | 4.0 · 50 % · **3.00×**<br>`m8` | 10.0 · 50 % · **0.50×**<br>`wgmma_m64n256` |", lines
assert "abc, def" in lines[-1], lines
assert "| 512×256 | 6.0 · 50 % · **2.00×**<br>`wgmma_m64n256` |" in render.gpu_gemm(render.only("gpu_gemm", few, MANY))
assert render.gpu_gemm(None, many) == "Not measured yet.\n"

# Operations without a product: a row per kernel and types, a column per matrix.
moved = {"memory_percent": 50.0, "kernel": "dequantize_awq", "d_dtype": "f16", "operation": "dequantize"}
lines = render.bandwidth({**DATA, "results": [result(512, 256, 1, "f16", 6.0, {}, **moved, **more) for more in ({}, {"transposed": True})]}).splitlines()
assert lines[0] == "| scheme | types | kernel | 512×256 |", lines
assert lines[2:4] == [f"| `u4b8g128` | f16 {order} | `dequantize_awq` | 6.0 · 2000 · 50 % |" for order in ("[N,K]", "[K,N]")], lines
quantized = {**DATA, "results": [result(128, 256, 8, "bf16", 6.0, {}, **{**moved, "operation": "quantize", "d_dtype": "s8"})]}
assert "| `u4b8g128` | bf16 → s8 | `dequantize_awq` | 6.0 · 2000 · 50 % |" in render.bandwidth(quantized) and "8×256" in render.bandwidth(quantized)
