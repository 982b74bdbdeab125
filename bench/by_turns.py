#!/usr/bin/env python3
"""Compares kernels on a machine that is not quiet: each is measured in every round, one after the other.

usage: bench/by_turns.py NIBBLE KERNEL,KERNEL,... JSON BENCH OPTION...

NIBBLE        the tool to measure with, build/bin/nibble
KERNEL        names of nibble doctor --kernels; the first one is compared with each of the others
JSON          where the result goes, for docs/render.py
BENCH OPTION  what to measure: --conv bench/shapes/conv-by-turns.txt --scheme s8t_s8c --a-dtype s8 --image-layout nhwc --threads 1

Of each kernel and layer the JSON has the median of every round's measurement: the least one is the kernel's when nothing else ran,
the middle one is what this machine gave it.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROUNDS = 9


def measure(nibble, kernel, options, scratch):
    part = pathlib.Path(scratch) / "part.json"
    command = [nibble, "bench", "--kernel", kernel, "--no-baselines", "--json", str(part), *options]
    if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
        sys.exit("by_turns.py: failed: " + " ".join(command))
    return json.loads(part.read_text())


def main():
    if len(sys.argv) < 5:
        sys.exit(__doc__)
    nibble, kernels, output, *options = sys.argv[1:]
    kernels = kernels.split(",")
    rows, said = {}, None
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(ROUNDS):
            print(f"round {turn + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            for kernel in kernels:
                said = measure(nibble, kernel, options, scratch)
                for r in said["results"]:
                    key = r["name"], r["m"], r["n"], r["k"], r["scheme"], r["a_dtype"]
                    rows.setdefault(key, {}).setdefault(kernel, []).append(round(r["median_us"], 1))
    fields = ("name", "m", "n", "k", "scheme", "a_dtype")
    results = [{**dict(zip(fields, key)), "median_us": times} for key, times in rows.items()]
    data = {"commit": said["commit"], "date": said["date"], "device": said["device"], "options": options, "kernels": kernels,
            "results": results}  # fmt: skip
    pathlib.Path(output).write_text(json.dumps(data, indent=1) + "\n")
    for r in results:
        first, *others = (min(r["median_us"][k]) for k in kernels)
        middle = [statistics.median(r["median_us"][k]) for k in kernels]
        print(f"{r['name']:20} M={r['m']:<6} {first:9.1f} µs   " + "  ".join(f"{x:9.1f} ({x / first:.2f}×)" for x in others)
              + "   middle: " + " ".join(f"{x:.1f}" for x in middle))


if __name__ == "__main__":
    main()
