#!/usr/bin/env python3
"""How long a checkpoint takes from the page cache to packed weights: in one pass, as packed_weight() does it; and in two, reading and
decoding every quantized module into codes of a byte each, and packing these.

usage: bench/loading.py [--json FILE] CHECKPOINT...

Five rounds; of each the sums over the modules, and of these the medians. NIBBLE_NUM_THREADS limits the threads. Checkpoints to measure:

  nibble sample float/ --shapes llama-3-8b --layers 2
  nibble quantize float/ awq/ --format awq            and gptq, compressed-tensors, int-quantized
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

import nibble

ROUNDS = 5


def described():
    root = pathlib.Path(__file__).resolve().parent.parent
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def measure(path):
    checkpoint = nibble.open(path)
    modules = [m for m in checkpoint.modules if m.quantized]
    if not modules:
        sys.exit(f"loading.py: {path} has no quantized module: make one as the usage says")
    loads, reads, packs = [], [], []
    for _ in range(ROUNDS):
        loaded = read = packed = 0.0
        for module in modules:
            begin = time.perf_counter()
            nibble.packed_weight(checkpoint, module.name)
            middle = time.perf_counter()
            q = checkpoint.read(module.name)
            between = time.perf_counter()
            nibble.pack(q)
            end = time.perf_counter()
            loaded, read, packed = loaded + middle - begin, read + between - middle, packed + end - between
        loads.append(loaded)
        reads.append(read)
        packs.append(packed)
    return {"format": modules[0].format, "modules": len(modules), "weights": sum(m.n * m.k for m in modules), "bytes": sum(m.bytes for m in modules),
            "load_ms": round(statistics.median(loads) * 1e3, 1), "read_ms": round(statistics.median(reads) * 1e3, 1), "pack_ms": round(statistics.median(packs) * 1e3, 1)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    commit = described()
    if args.json and commit.endswith("-dirty"):
        sys.exit("loading.py: commit the sources first: a result names the commit that reproduces it")
    device = nibble.doctor()
    results = [measure(path) for path in args.checkpoints]
    for r in results:
        print(f"{r['format']:20} {r['weights'] / 1e6:8.0f} M weights  in one pass {r['load_ms']:8.1f} ms, {r['bytes'] / 1e6 / r['load_ms']:.2f} GB/s of file  "
              f"read {r['read_ms']:8.1f} ms  pack {r['pack_ms']:8.1f} ms")
    if args.json:
        data = {"commit": commit, "cpu": device["cpu"], "isa": device["isa"], "threads": device["threads"], "rounds": ROUNDS, "results": results}
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
