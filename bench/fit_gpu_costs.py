#!/usr/bin/env python3
"""Fits the cost model of the wgmma kernels to measured times.

  bench/fit_gpu_costs.py src/kernels/cuda/table/h200_costs.inc bench/results/h200/{survey-{wna16,int8,fp8,fp8-blocks,groups,online,online-tokens},online-folds}.json

For each kernel four numbers, in microseconds, such that the predicted times (wgmma_cost_us in src/kernels/cuda/table/wgmma_cost.cpp, which is
written here once more) are as near to the measured ones as they can be, in the mean of the squared logarithms: `fixed` of a launch,
`pass` beside a pass's records, `step` of a record however few warpgroups work, and `block` of a record of one row block. Batches that
fill less than half of a kernel's tokens are left out: another kernel is for them. Files are what `nibble bench --json` writes,
or surveys of it (bench/survey.py); convolutions of NHWC images count as layers of as many tokens, for their passes have few records, and those of
codes without what their images take to become codes.
"""
import json
import math
import re
import sys
from pathlib import Path

import numpy as np

from survey import expand

SMS = 132
BYTES_A_US = 4.4e6  # of an H200, for results that do not say what the planner estimates for their GPU
# Layers by which choices are judged; nothing is fitted to them.
LEFT_OUT = {tuple(map(int, line.split()[:2])) for line in (Path(__file__).parent / "shapes/survey-left-out.txt").read_text().splitlines()
            if line and not line.startswith("#")}
L2_BYTES_A_US = 8.5e6  # to all SMs
BAND_TOKENS = 1024
RESIDENT = {1: SMS, 2: SMS // 2, 4: 30}  # clusters
LAUNCH_US = 1.5
STREAM_K = 0  # the split of kernels whose CTAs share passes wherever their run of records ends (gemm_schedule.hpp)
PART = 0.75  # what a part that is added takes of `pass`
# As WgmmaFamily has them.
FLOATS, FLOAT_FOLDS, ONLINE, ONLINE_TOKENS, ONLINE_FOLDS, S8, E4M3, E4M3_GROUPS = (
    "floats", "float_folds", "online", "online_tokens", "online_folds", "s8", "e4m3", "e4m3_groups")


def ceil(a, b):
    return -(-a // b)


def pass_shape(family, tokens, rows):
    """Row blocks of a pass, and warpgroups that share one's K (gemm_groups, w8a8_groups, w8a8_sm90_depth)."""
    blocks = rows // 64
    if family in (S8, E4M3, E4M3_GROUPS):
        depth = 2 if tokens <= 32 and blocks <= 2 else 1
        return min(blocks, 2 // depth) if family == E4M3_GROUPS and tokens >= 64 else blocks, depth
    return blocks, (4 if tokens <= 64 else 3 if tokens == 128 else 2) // blocks


class Measured:
    """A kernel's time for a layer, of a weight and activations of so many bytes and an output of 16 bits."""

    def __init__(self, family, tile, n, k, m, us, weight, acts, bytes_a_us=BYTES_A_US):
        self.family, self.tile, self.layer, self.us = family, tile, (n, k, m), us
        tokens, rows, split = tile
        blocks, self.depth = pass_shape(family, tokens, rows)
        bands = ceil(m, tokens) * tokens >= 2 * BAND_TOKENS
        row_blocks, tiles, records = ceil(n, 64), ceil(m, tokens), ceil(k, 128)
        blocks = self.wide = min(blocks, row_blocks)  # of a pass
        row_tiles = ceil(row_blocks, blocks)
        passes, self.parts = row_tiles * tiles, 0  # of the pass that a CTA finishes
        if split == STREAM_K:
            whole, each = stream_k(passes, tiles, records)
            self.passes, self.parts = whole + (each > 0), ceil(records, each) if each else 0
            self.steps = whole * records + each
        elif split == 1 and not bands:
            self.passes, self.wide = most_passes(row_blocks, tiles, blocks)
            self.steps = self.passes * ceil(records, self.depth)
        else:
            self.passes = ceil(passes, RESIDENT[split])
            self.steps = self.passes * ceil(ceil(records, split), self.depth)
        self.moved_us = max((weight + acts + 2 * m * n) / bytes_a_us, (tiles * weight + row_tiles * acts + 2 * m * n) / L2_BYTES_A_US)


def most_passes(row_blocks, tiles, blocks):
    """Of a CTA, where units are distributed: its passes, and the row blocks of one (distribute, Schedule::most_passes)."""
    units = row_blocks * tiles
    ctas = min(units, SMS)
    multiple = SMS - SMS % tiles
    if 0 < multiple < units and ceil(units, multiple) == ceil(units, SMS):
        ctas = multiple
    longest = ceil(units, ctas)
    passes = ceil(longest, blocks)
    for end in range(row_blocks, units, row_blocks):  # of a token tile: in whose run?
        cta = ((end + 1) * ctas - 1) // units
        passes = max(passes, ceil(end - cta * units // ctas, blocks) + ceil((cta + 1) * units // ctas - end, blocks))
    return passes, longest / passes


def stream_k(passes, tiles, records):
    """Whole passes of a CTA, and its records of the line (distribute)."""
    rest = passes % SMS
    whole = passes - rest
    if rest and 3 * rest < SMS and whole:
        whole -= SMS
    alike = whole == 0 and SMS % tiles <= SMS // 16  # CTAs of every token tile
    return whole // SMS, ceil((passes - whole) * records, SMS - SMS % tiles if alike else SMS)


def tile_of(kernel):
    m = re.search(r"_(wgmma|streamk)(\d*)_m(\d+)n(\d+)", kernel)
    return (int(m[3]), int(m[4]), STREAM_K if m[1] == "streamk" else int(m[2] or 1)) if m else None


def measurements(path):
    data = expand(json.loads(Path(path).read_text()))
    device = data.get("device")
    bytes_a_us = 1e3 * device["estimated_gbytes_per_s"] if isinstance(device, dict) and "estimated_gbytes_per_s" in device else BYTES_A_US
    for r in data.get("results", []):
        tile, n, k, m = tile_of(r["kernel"]), r["n"], r["k"], r["m"]
        if (n, k) in LEFT_OUT and "d_dtype" in r:
            continue
        if tile and r.get("a_dtype") in ("s8", "e4m3"):  # codes on both sides
            yield Measured(S8 if r["a_dtype"] == "s8" else E4M3_GROUPS if "g128" in r["scheme"] else E4M3, tile, n, k, m, r["median_us"],
                           n * k, m * k, bytes_a_us)
            continue
        if tile and r["kernel"].startswith("conv_any_f16_"):  # images as they are: patches of tokens, of few records often
            c = r["conv"]
            images = c["batch"] * c["height"] * c["width"] * c["in_channels"]
            if c["input"] == c["output"] == "nhwc":
                yield Measured(FLOAT_FOLDS if "g64" in r["scheme"] else FLOATS, tile, n, k, m, r["median_us"], n * k / 2, 2 * images)
        if tile and r["kernel"].startswith("conv_any_s8_") and r["conv"]["input"] == "nhwc":  # f16 images become codes first
            c = r["conv"]
            images = c["batch"] * c["height"] * c["width"] * c["in_channels"]
            codes_us = LAUNCH_US + 3 * images / (0.7 * BYTES_A_US)
            yield Measured(S8, tile, n, k, m, r["median_us"] - codes_us, n * k, m * k)
        if tile is None or not r["kernel"].startswith("linear_any_") or r["kernel"].startswith("linear_any_s8_"):
            continue  # the last: pointwise convolutions of codes, which a step in front makes of images
        *act, weight = r["scheme"].split("_")
        bits = 4 if weight.startswith("u4") else 8
        packed = ceil(n, 64) * ceil(k, 128) * (64 * 128 * bits / 8 + 128)
        if act:
            folds = "g32" in act[0] + weight or "g64" in act[0] + weight
            quantizer_us = LAUNCH_US + m * k * (2 + 1 + 8 / 128) / (0.75 * bytes_a_us)  # a step of its own in the plan
            family = ONLINE_FOLDS if folds else ONLINE_TOKENS if act[0] in ("s8r", "s8t") else ONLINE
            yield Measured(family, tile, n, k, m, r["median_us"] - quantizer_us, packed, m * k, bytes_a_us)
        else:
            folds = "g32" in weight or "g64" in weight
            yield Measured(FLOAT_FOLDS if folds else FLOATS, tile, n, k, m, r["median_us"], packed, 2 * m * k, bytes_a_us)


def predict(p, x):
    fixed, turn, step, block = p
    return fixed + PART * x.parts * turn + max(x.moved_us, x.passes * turn + x.steps * max(step, x.wide * x.depth * block))


def fit(data):
    """The four numbers, and how far off they are: random steps, smaller and smaller, from several places."""
    weight, moved, passes, parts, steps, wide, us = np.array(
        [(w, x.moved_us, x.passes, x.parts, x.steps, x.wide * x.depth, x.us) for w, x in data]).T

    def losses(tries):
        fixed, turn, step, block = tries.T[..., None]
        predicted = fixed + PART * parts * turn + np.maximum(moved, passes * turn + steps * np.maximum(step, wide * block))
        return (weight * np.log(predicted / us) ** 2).sum(1) / weight.sum()

    random = np.random.default_rng(1)
    best, found = math.inf, None
    for start in ((3.0, 0.5, 0.25, 0.1), (1.0, 2.0, 0.1, 0.3), (0.1, 4.0, 0.5, 0.05), (0.1, 0.5, 0.1, 0.7)):
        at, value = np.array(start), math.inf
        for scale in (1.0, 0.5, 0.2, 0.1, 0.05, 0.02):
            for _ in range(300):
                tries = np.maximum(1e-3, at * np.exp(scale * random.normal(size=(64, 4))))
                loss = losses(tries)
                if loss.min() < value:
                    at, value = tries[loss.argmin()], loss.min()
        if value < best:
            best, found = value, tuple(float(x) for x in at)
    return found, math.sqrt(best)


def print_regret(measured, model):
    """How much slower than the best the kernel is that the model would choose, over the measured layers of each family."""
    layers = {}
    for x in measured:
        if (x.family, x.tile) in model:
            layers.setdefault((x.family, x.layer), []).append((predict(model[x.family, x.tile], x), x.us, x.tile))
    for family in sorted({f for f, _ in layers}):
        regrets = sorted(((min(c)[1] / min(us for _, us, _ in c) - 1, layer, min(c)[2], min((us, t) for _, us, t in c)[1])
                          for (f, layer), c in layers.items() if f == family), reverse=True)
        print(f"{family}: median {100 * regrets[len(regrets) // 2][0]:.1f} %")
        for regret, (n, k, m), chosen, best in regrets[:4]:
            print(f"  {100 * regret:5.1f} %  N={n} K={k} M={m}: {chosen} instead of {best}")


def main():
    to, *paths = sys.argv[1:]
    surveys = [x for path in paths if Path(path).name.startswith("survey-") for x in measurements(path)]
    surveyed = {x.family for x in surveys}  # measured in a random order: what was measured otherwise does not count beside it
    measured = surveys + [x for path in paths if not Path(path).name.startswith("survey-") for x in measurements(path)
                          if x.family not in surveyed]
    lines, model = [], {}
    for family, tile in sorted({(x.family, x.tile) for x in measured}):
        # Few tokens are another kernel's, but of a family whose smallest tile this is; many are few measurements, far from the others.
        data = [(5 if x.layer[2] >= 512 else 1, x) for x in measured
                if (x.family, x.tile) == (family, tile) and (2 * x.layer[2] >= tile[0] or tile[0] == 16)]
        if not data:
            continue
        p, error = fit(data)
        model[family, tile] = p
        lines.append("    {WgmmaFamily::%s, %d, %d, %d, %.2ff, %.2ff, %.3ff, %.4ff},  // %d measured, %.0f %% off\n"
                     % (family, *tile, *p, len(data), 100 * error))
    print_regret(measured, model)
    Path(to).write_text(f"// Made by bench/fit_gpu_costs.py from {', '.join(paths)}.\n"
                        "// Family, tokens, rows, split; µs fixed, a pass, a step, a row block.\n" + "".join(lines))


if __name__ == "__main__":
    main()
