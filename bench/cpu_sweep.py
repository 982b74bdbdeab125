#!/usr/bin/env python3
"""Measures every mode of the CPU backend on the layers of Llama 3 8B, into one JSON that docs/render.py shows as a table.

usage: bench/cpu_sweep.py NIBBLE [BENCH OPTION...]

NIBBLE        the tool to measure with, build/bin/nibble
BENCH OPTION  passed on to every `nibble bench`: --threads 4, --min-time 1

--output FILE (default bench/results/cpu-llama3-8b.json), --shapes FILE (default bench/shapes/llama3-8b.txt) and -M M,... (default
1,4,16,64,256) are the script's own.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import survey

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Activation type, schemes.
MODES = [
    ("f32", ["u4b8g32", "u4b8g128", "u4zg128"]),
    ("bf16", ["u4b8g128", "e4m3c"]),
    ("f32", ["s8g128_u4b8g128", "s8zg128_u4zg128", "s8g32_u4b8g32", "s8zg32_u4zg32", "s8r_s8c"]),
]


def take(arguments, name, default):
    """Removes an option with its value from the arguments."""
    if name not in arguments:
        return default
    at = arguments.index(name)
    if at + 1 == len(arguments):
        sys.exit(f"cpu_sweep.py: {name} needs a value")
    value = arguments[at + 1]
    del arguments[at:at + 2]
    return value


def short(result):
    """Four digits of each number, and no single rounds."""
    return {key: survey.digits(value) if isinstance(value, float) else value for key, value in result.items() if key != "round_percents"}


def main():
    arguments = sys.argv[1:]
    output = pathlib.Path(take(arguments, "--output", ROOT / "bench/results/cpu-llama3-8b.json"))
    shapes = take(arguments, "--shapes", ROOT / "bench/shapes/llama3-8b.txt")
    rows = take(arguments, "-M", "1,4,16,64,256")
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    nibble, *options = arguments
    merged = None
    with tempfile.TemporaryDirectory() as scratch:
        part = pathlib.Path(scratch) / "part.json"
        for act, schemes in MODES:
            command = [nibble, "bench", "--shapes", str(shapes), "--scheme", ",".join(schemes), "--a-dtype", act, "-M", rows, "--no-baselines",
                       "--json", str(part), *options]
            print("$ " + " ".join(command), file=sys.stderr, flush=True)
            if code := subprocess.run(command, check=False).returncode:
                return code
            data = json.loads(part.read_text())
            if merged is None:
                merged = data
                continue
            merged["results"] += data["results"]
            for ceiling in ("read_gbytes_per_s", "f32_gflops", "bf16_gflops", "int8_gops"):  # at best, of all runs
                merged["device"][ceiling] = max(merged["device"][ceiling], data["device"][ceiling])
    output.parent.mkdir(parents=True, exist_ok=True)
    merged["results"] = [short(result) for result in merged["results"]]
    output.write_text(survey.text(merged, "results"))
    print(f"wrote {output}: {len(merged['results'])} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
