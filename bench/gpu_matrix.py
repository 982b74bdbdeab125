#!/usr/bin/env python3
"""Runs the benchmarks of a GPU that are committed: bench/gpu_matrix.json.

usage: bench/gpu_matrix.py NIBBLE RESULTS [NAME...]

Each row of the matrix is a run of `nibble bench --backend cuda` with its options, whose result goes to a file in RESULTS. NAMEs, of results
without .json, run those alone.
"""

import json
import pathlib
import shlex
import subprocess
import sys

MATRIX = pathlib.Path(__file__).with_suffix(".json")


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__.split("\n\n")[1])
    nibble, results, names = sys.argv[1], pathlib.Path(sys.argv[2]), set(sys.argv[3:])
    rows = json.loads(MATRIX.read_text())
    if unknown := names - {row["result"].removesuffix(".json") for row in rows}:
        sys.exit(f"no row of {MATRIX.name} has the result {', '.join(sorted(unknown))}")
    for row in rows:
        if names and row["result"].removesuffix(".json") not in names:
            continue
        command = [nibble, "bench", "--backend", "cuda", *shlex.split(row["options"]), "--json", str(results / row["result"])]
        print(f"\n== {row['what']}\n$ {shlex.join(command)}", file=sys.stderr, flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
