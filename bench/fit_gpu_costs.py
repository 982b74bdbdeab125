#!/usr/bin/env python3
"""Fits the cost model of the wgmma kernels to measured times.

  bench/fit_gpu_costs.py src/kernels/cuda/h200_costs.inc bench/results/h200/gemm-kernels.json bench/results/h200/gemm-prefill.json

For each kernel four numbers, in microseconds, such that the predicted times (wgmma_cost_us in src/kernels/cuda/cuda_kernels.cpp,
which is written here once more) are as near to the measured ones as they can be, in the mean of the squared logarithms: `fixed` of a
launch, `pass` beside a pass's records, `step` of a record however few warpgroups work, and `block` of a record of one row block.
Batches that fill less than half of a kernel's tokens are left out: another kernel is for them.
"""
import json
import math
import random
import re
import sys

SMS, BYTES_A_US = 132, 4.4e6
RESIDENT = {1: SMS, 2: SMS // 2, 4: 30}  # clusters


def ceil(a, b):
    return -(-a // b)


def parse(kernel):
    m = re.search(r"wgmma(\d*)_m(\d+)n(\d+)", kernel)
    return (int(m[2]), int(m[3]), int(m[1] or 1)) if m else None


def features(tokens, rows, split, r):
    blocks = rows // 64
    depth = (4 if tokens <= 64 else 3 if tokens == 128 else 2) // blocks
    row_blocks, tiles, records = ceil(r["n"], 64), ceil(r["m"], tokens), ceil(r["k"], 128)
    steps = ceil(ceil(records, split), depth)
    if split == 1:
        units = ceil(row_blocks * tiles, RESIDENT[1])
        passes = ceil(units, blocks)
        wide = units / passes
    else:
        passes = ceil(ceil(row_blocks, blocks) * tiles, RESIDENT[split])
        wide = blocks
    bits = 4 if "u4" in r["scheme"] else 8
    moved = (row_blocks * records * (64 * 128 * bits / 8 + 128) + 2 * r["m"] * (r["n"] + r["k"])) / BYTES_A_US
    return moved, passes, steps, wide * depth


def predict(p, f):
    fixed, turn, step, block = p
    moved, passes, steps, wide = f
    return fixed + max(moved, passes * (turn + steps * max(step, wide * block)))


def loss(p, data):
    return sum(math.log(predict(p, f) / us) ** 2 for f, us in data) / len(data)


def fit(data):
    random.seed(1)
    best, at = math.inf, (3.0, 0.5, 0.25, 0.1)
    for scale in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02):
        for _ in range(4000):
            p = tuple(max(1e-3, x * math.exp(scale * random.gauss(0, 1))) for x in at)
            value = loss(p, data)
            if value < best:
                best, at = value, p
    return at, math.sqrt(best)


def regret(results, model):
    """How much slower than the best the kernel is that the model would choose, over the measured layers."""
    layers = {}
    for r in results:
        if (key := parse(r["kernel"])) is not None:
            layers.setdefault((r["n"], r["k"], r["m"]), []).append((predict(model[key], features(*key, r)), r["median_us"], key))
    losses = sorted(((min(c)[1] / min(x[1] for x in c) - 1, layer, min(c)[2], min((x[1], x[2]) for x in c)[1]) for layer, c in layers.items()), reverse=True)
    for loss_, layer, chosen, best in losses[:8]:
        print("%4.1f %%  N=%d K=%d M=%d: %s instead of %s" % (100 * loss_, *layer, chosen, best))
    print("median %.1f %%" % (100 * losses[len(losses) // 2][0]))


def main():
    results = [r for path in sys.argv[2:] for r in json.load(open(path))["results"]]
    rows = {}
    for r in results:
        if (key := parse(r["kernel"])) is not None:
            rows.setdefault(key, []).append(r)
    lines, model = [], {}
    for key in sorted(rows):
        data = [(features(*key, r), r["median_us"]) for r in rows[key] if 2 * r["m"] >= key[0]]
        data += 4 * [(features(*key, r), r["median_us"]) for r in rows[key] if r["m"] >= 512]  # few, and far from the others
        p, error = fit(data)
        model[key] = p
        lines.append("    {%d, %d, %d, %.2ff, %.2ff, %.3ff, %.4ff},  // %d measured, %.0f %% off" % (*key, *p, len(data), 100 * error))
    regret(results, model)
    open(sys.argv[1], "w").write(
        "// Made by bench/fit_gpu_costs.py from %s.\n// Tokens, rows, split; µs fixed, a pass, a step, a row block.\n" % " and ".join(sys.argv[2:])
        + "\n".join(lines) + "\n")


main()
