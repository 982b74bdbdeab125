#!/usr/bin/env python3
"""Measures how far the exact kernels are from a double-precision result, for ordinary and for outlier-ridden activations, as JSON.

usage: docs/measure_exactness.py NIBBLE OUT.json
"""

import json
import pathlib
import subprocess
import sys
import tempfile


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE).stdout


def main():
    nibble, out = sys.argv[1:]
    kernels = [k["name"] for k in json.loads(run(nibble, "doctor", "--kernels", "--json"))["kernels"]
               if k["op"] == "linear" and k["backend"] == "cpu" and k["runs_here"] and "_s8_any" not in k["name"]]
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        model, quantized = pathlib.Path(temporary) / "model", pathlib.Path(temporary) / "awq"
        run(nibble, "sample", model, "--shapes", "llama-3.2-1b", "--layers", 1, "--seed", 1)
        run(nibble, "quantize", model, quantized, "--format", "awq", "--scheme", "u4zg128")
        for kernel in kernels:
            for act in ["f32", "f16", "bf16"]:
                if "_bf16_any" in kernel and act != "bf16":
                    continue
                for outliers in [1, 1000]:
                    report = json.loads(run(nibble, "verify", quantized, "--layer", "down_proj", "-M", 8, "--sample-columns", 256, "--a-dtype", act, "--out", "f32", "--kernel", kernel,
                                            "--outliers", outliers, "--json"))
                    for r in report["results"]:
                        results.append({"kernel": kernel, "a_dtype": act, "outliers": outliers, "relative_l2": r["relative_l2"],
                                        "worst_error_over_bound": r["worst_error_over_bound"], "scheme": r["scheme"],
                                        "n": r["n"], "k": r["k"], "m": r["m"]})
    pathlib.Path(out).write_text(json.dumps({"schema": 1, "results": results}, indent=1) + "\n")


main()
