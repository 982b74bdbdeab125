#!/usr/bin/env python3
"""Runs bench/cpu_sweep.py on two small layers and renders what it wrote.

usage: tests/cli/cpu_sweep_test.py NIBBLE
"""

import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "bench")]
sys.dont_write_bytecode = True
import cpu_sweep  # noqa: E402
import render  # noqa: E402


def main():
    modes = [(act, scheme) for act, schemes in cpu_sweep.MODES for scheme in schemes]
    with tempfile.TemporaryDirectory() as scratch:
        shapes, output = pathlib.Path(scratch) / "shapes.txt", pathlib.Path(scratch) / "made/sweep.json"
        shapes.write_text("48 256 wide\n64 128 narrow\n")
        subprocess.run([sys.executable, str(ROOT / "bench/cpu_sweep.py"), sys.argv[1], "--shapes", str(shapes), "-M", "1,3", "--min-time",
                        "0.001", "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
        data = json.loads(output.read_text())
    assert len(data["results"]) == len(modes) * 2 * 2, len(data["results"])
    table = render.cpu_modes(data).splitlines()
    assert table[0] == "| mode | peak | M = 1 | M = 3 |", table[0]
    rows = table[2:table.index("")]
    assert [row.split("|")[1].strip() for row in rows] == [f"`{scheme}` × {act}" for act, scheme in modes], rows
    assert all("GB/s" in row and "/s |" in row for row in rows), rows
    assert [row.split("|")[2].strip() for row in rows if "`s8" in row] == ["int8"] * 5, rows
    assert "./dev bench cpu" in render.cpu_modes(None)


if __name__ == "__main__":
    main()
