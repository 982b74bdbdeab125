#!/usr/bin/env python3
"""Fits the cost model of the wgmma kernels to measured times.

  bench/fit_gpu_costs.py src/kernels/cuda/table/h200_costs.inc bench/results/h200/survey-{wna16,int8,fp8,fp8-blocks,groups,8bit,online,online-tokens,online-folds,f32,f32-groups}.json

For each kernel four numbers, in microseconds, such that the predicted times (wgmma_cost_us in src/kernels/cuda/table/wgmma_cost.cpp) are as near
to the measured ones as they can be, in the weighted mean of the squared logarithms: `fixed` of a launch, `pass` beside a pass's records, `step` of a record
however few warpgroups work, and `block` of a record of one row block. build/bin/gpu_features computes the rest as the planner does. Batches
that fill less than half of a kernel's tokens are left out: another kernel is for them.
"""
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
FEATURES = ROOT / "build/bin/gpu_features"
# Layers by which choices are judged; nothing is fitted to them.
LEFT_OUT = {tuple(map(int, line.split()[:2])) for line in (ROOT / "bench/shapes/survey-left-out.txt").read_text().splitlines()
            if line and not line.startswith("#")}
PART, READS, PRODUCTS = 0.75, 2.5, 4  # as in wgmma_cost_us


def measurements(paths):
    """One a kernel and layer: its features and the microseconds it took."""
    lines = subprocess.run([FEATURES, *paths], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    for x in map(json.loads, lines):
        if "passes" not in x:
            continue  # of fit_decode_costs.py
        x["kernel"] = (x["family"], *x["tile"])
        x["numbers"] = [x[key] for key in ("memory_us", "l2_us", "passes", "steps", "blocks", "parts", "us")]
        yield x


def predict(tries, numbers):
    """Microseconds by each of several sets of four numbers, of each measurement."""
    fixed, turn, step, block = tries.T[..., None]
    memory, l2, passes, steps, blocks, parts, _ = numbers
    products = passes * turn + steps * np.maximum(step, blocks * block)
    reads = (memory**READS + l2**READS) ** (1 / READS)
    return fixed + PART * parts * turn + (reads**PRODUCTS + products**PRODUCTS) ** (1 / PRODUCTS)


def search(predict, starts, numbers, weight, turns=200, moved=1.0):
    """The parameters whose predictions are nearest to the last row of `numbers`, and how far off they are: random steps, smaller and smaller.
    Each of them moves that share of the parameters."""
    random = np.random.default_rng(1)
    best, found = math.inf, None
    for start in starts:
        at, value = np.array(start), math.inf
        for scale in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02):
            for _ in range(turns):
                steps = scale * random.normal(size=(32, len(start)))
                if moved < 1:
                    steps *= random.random(steps.shape) < moved
                tries = np.maximum(1e-3, at * np.exp(steps))
                losses = (weight * np.log(predict(tries, numbers) / numbers[-1]) ** 2).sum(1) / weight.sum()
                if losses.min() < value:
                    at, value = tries[losses.argmin()], losses.min()
        if value < best:
            best, found = value, at
    return found, math.sqrt(best)


def fit(data, fastest):
    """The four numbers, and how far off they are."""
    numbers = np.array([x["numbers"] for x in data]).T
    # Many tokens are few measurements, far from the others. A kernel that is far from the fastest is not chosen anyway.
    weight = np.array([(5 if x["layer"][2] >= 512 else 1) * (fastest[x["family"], *x["layer"]] / x["us"]) ** 4 for x in data])
    return search(predict, ((3.0, 0.5, 0.25, 0.1), (1.0, 2.0, 0.1, 0.3), (0.1, 4.0, 0.5, 0.05), (0.1, 0.5, 0.1, 0.7)), numbers, weight)


def print_regret(measured, model):
    """How much slower than the best the kernel is that the model would choose, over the measured layers of each family."""
    layers = {}
    for x in measured:
        if x["kernel"] in model:
            predicted = predict(model[x["kernel"]][None], np.array(x["numbers"])[:, None])[0, 0]
            layers.setdefault((x["family"], tuple(x["layer"])), []).append((predicted, x["us"], x["tile"]))
    for family in sorted({f for f, _ in layers}):
        regrets = sorted(((min(c)[1] / min(us for _, us, _ in c) - 1, layer, min(c)[2], min((us, t) for _, us, t in c)[1])
                          for (f, layer), c in layers.items() if f == family), reverse=True)
        print(f"{family}: median {100 * regrets[len(regrets) // 2][0]:.1f} %")
        for regret, (n, k, m, _), chosen, best in regrets[:4]:
            print(f"  {100 * regret:5.1f} %  N={n} K={k} M={m}: {chosen} instead of {best}")


def main():
    to, *paths = sys.argv[1:]
    measured = list(measurements(paths))
    lines, model, fastest = [], {}, {}
    for x in measured:
        layer = (x["family"], *x["layer"])
        fastest[layer] = min(x["us"], fastest.get(layer, math.inf))
    for kernel in sorted({x["kernel"] for x in measured}):
        # Few tokens are another kernel's, but of a family whose smallest tile this is.
        data = [x for x in measured if x["kernel"] == kernel and tuple(x["layer"][:2]) not in LEFT_OUT
                and (2 * x["layer"][2] >= kernel[1] or kernel[1] == 16)]
        if not data:
            continue
        model[kernel], error = fit(data, fastest)
        lines.append("    {WgmmaFamily::%s, %d, %d, %d, %.2ff, %.2ff, %.3ff, %.4ff},  // %d measured, %.0f %% off\n"
                     % (*kernel, *model[kernel], len(data), 100 * error))
    print_regret(measured, model)
    Path(to).write_text(f"// Made by bench/fit_gpu_costs.py from {', '.join(paths)}.\n"
                        "// Family, tokens, rows, split; µs fixed, a pass, a step, a row block.\n" + "".join(lines))


if __name__ == "__main__":
    main()
