#!/usr/bin/env python3
"""Quantizes a float checkpoint in many ways and writes how far each is from the original, per layer, as JSON.

usage: docs/measure_accuracy.py NIBBLE MODEL_DIR OUT.json [--name TEXT]
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

# bits, group (0: per channel), symmetric, clipping search
SETTINGS = [
    (8, 0, True, False), (8, 128, False, False),
    (4, 0, True, False), (4, 128, True, False), (4, 128, True, True), (4, 128, False, False), (4, 128, False, True),
    (4, 32, True, True), (4, 32, False, True),
    (3, 128, False, True), (2, 32, False, True),
]


def measure(nibble, model, bits, group, symmetric, clip_search):
    with tempfile.TemporaryDirectory() as temporary:
        out = pathlib.Path(temporary) / "quantized"
        scheme = f"u{bits}b{1 << (bits - 1)}" if symmetric else f"u{bits}z"
        scheme += f"g{group}" if group else "c"
        command = [nibble, "quantize", model, out, "--format", "compressed-tensors", "--scheme", scheme] + (["--clip-search"] if clip_search else [])
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        inspected = json.loads(subprocess.run([nibble, "inspect", out, "--reference", model, "--json"], check=True,
                                              stdout=subprocess.PIPE).stdout)
    modules = inspected["modules"]
    sqnr = [m["error"]["sqnr_db"] for m in modules]
    return {
        "scheme": modules[0]["scheme"], "clip_search": clip_search,
        "bits_per_weight": inspected["totals"]["bits_per_weight"],
        "sqnr_db": {"min": min(sqnr), "median": statistics.median(sqnr), "max": max(sqnr)},
        "cosine_min": min(m["error"]["cosine"] for m in modules),
        "modules": len(modules),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nibble")
    parser.add_argument("model")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--name", help="what to call the model in the table")
    args = parser.parse_args()
    rows = [measure(args.nibble, args.model, *setting) for setting in SETTINGS]
    result = {"schema": 1, "model": args.name or pathlib.Path(args.model).name, "modules": rows[0]["modules"], "rows": rows}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
