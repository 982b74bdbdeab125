#!/usr/bin/env python3
"""Fits the cost model of the decode kernels to measured times.

  bench/fit_decode_costs.py src/kernels/cuda/table/h200_decode_costs.inc bench/results/h200/survey-{wna16,groups,8bit,online,online-tokens,online-folds}.json

For each family of records the numbers of DecodeCost, such that the predicted times (decode_us in src/kernels/cuda/table/decode_cost.cpp) are as near
to the measured ones as they can be, in the weighted mean of the squared logarithms. The rows of a family differ in the split, the stages and the
tokens of a launch, which are features. build/bin/gpu_features computes these as the planner does.
"""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from fit_gpu_costs import FEATURES, LEFT_OUT, search

KEYS = ("tokens", "stages", "rounds", "records", "clusters", "ctas", "early", "memory_us", "fill_us", "codes", "us")
START = {"fixed": 3.0, "early": 0.2, "cluster": 1.0, "token": 0.2, "round": 0.2, "round16": 0.4, "record": 0.08, "record16": 0.1,
         "stall": 0.05, "fill": 0.1, "code": 0.1, "memory": 1.0, "ctas": 100.0}


def predict(tries, numbers):
    """Microseconds by each of several sets of numbers, of each measurement."""
    fixed, early, cluster, token, turn, turn16, record, record16, stall, fill, code, share, busy = tries.T[..., None]
    tokens, stages, rounds, records, clusters, ctas, room, memory, ring, codes, _ = numbers
    start = np.where(room, fixed * (1 - np.minimum(early, 0.5)), fixed + fill * ring)
    record = np.where(tokens <= 8, record, record16) + np.maximum(0, 3 - stages) * stall
    turn = np.where(tokens <= 8, turn, turn16)
    return (start + clusters * cluster + (np.minimum(tokens, 8) - 1) * token + rounds * turn + codes * code
            + np.maximum(share * memory * np.maximum(1, busy / ctas), records * record))


def main():
    to, *paths = sys.argv[1:]
    lines = subprocess.run([FEATURES, *paths], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    measured = [x for x in map(json.loads, lines) if x.get("launches") == 1]
    rows = []
    for family in sorted({x["family"] for x in measured}):
        every = [x for x in measured if x["family"] == family]
        data, judged = ([x for x in every if (tuple(x["layer"][:2]) in LEFT_OUT) == left] for left in (False, True))
        fastest = {}
        for x in data:
            fastest[*x["layer"]] = min(x["us"], fastest.get((*x["layer"],), np.inf))
        numbers, judged = (np.array([[float(x[key]) for key in KEYS] for x in part]).T for part in (data, judged))
        # A kernel that is far from the fastest is not chosen anyway.
        weight = np.array([(fastest[*x["layer"]] / x["us"]) ** 4 for x in data])
        starts = [[scale * x for x in START.values()] for scale in (1, 3, 1 / 3)]
        found, error = search(predict, starts, numbers, weight, turns=1000, moved=0.3)
        found = {key: x if x > 2e-3 else 0 for key, x in zip(START, found)}
        found["early"] = min(found["early"], 0.5)
        if not numbers[KEYS.index("codes")].any():
            found["code"] = 0
        else:  # rows of up to 8 tokens, with rings of 3 stages or more
            found["round16"], found["record16"], found["stall"] = 0, 0, START["stall"]
        left = np.sqrt(np.mean(np.log(predict(np.array([[*found.values()]]), judged)[0] / judged[-1]) ** 2))
        print(f"{family}: {100 * error:.1f} % off, {100 * left:.1f} % for layers that are left out")
        rows.append("    {WgmmaFamily::%s, {%s}},  // %d measured, %.0f %% off\n"
                    % (family, ", ".join(f"{x:.3f}" for x in found.values()), len(data), 100 * error))
    Path(to).write_text(f"// Made by bench/fit_decode_costs.py from {', '.join(paths)}.\n"
                        "// Family; DecodeCost.\n" + "".join(rows))


if __name__ == "__main__":
    main()
