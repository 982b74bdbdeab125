#!/usr/bin/env python3
"""Makes surveys of what `nibble bench --json` wrote: what is needed to compare, to render tables and to fit costs, and no more.

usage: bench/survey.py FILE...

Rewrites each FILE that `nibble bench` wrote: a row for each layer, M, scheme and type, with the median of every kernel in `us`, in the order of
`kernels` or by the number there, the number of the kernel that the planner chose, the bytes that have to move and the medians of baselines;
one row a line. What most rows have stands in `every`: a row that does not have it says null. Other files stay as they are.
A file of a build whose sources were not committed is refused: nobody could measure it again.
"""

import collections
import json
import pathlib
import sys

KEPT = ("name", "n", "k", "m", "scheme", "a_dtype", "d_dtype", "conv", "calls", "operation", "transposed", "glu", "norm", "prescale", "block")

BACK_TO_BACK = "back-to-back"  # how calls follow each other where a row does not say


def called(rows, calls=BACK_TO_BACK):
    """The rows, or results, whose calls followed each other in that way."""
    return [row for row in rows if row.get("calls", BACK_TO_BACK) == calls]


def digits(us):
    return float(f"{us:.4g}")


def shorter(us, kernels):
    """The times of a row by the numbers of their kernels or, where that is shorter, in the order of `kernels`."""
    listed = [us.get(kernel) for kernel in kernels]
    return min({str(i): t for i, t in enumerate(listed) if t is not None}, listed, key=lambda form: len(json.dumps(form)))


def shortened(rows):
    """What more than half of the rows have, and the rows without it."""
    every = {}
    for key in dict.fromkeys(key for row in rows for key in row if key in KEPT):
        values = collections.Counter(json.dumps(row[key]) for row in rows if key in row)
        value, count = values.most_common(1)[0]
        if 2 * count > len(rows):
            every[key] = json.loads(value)
    return every, [{**{key: row.get(key) for key in every if row.get(key) != every[key]}, **{key: x for key, x in row.items() if key not in every}} for row in rows]


def whole(data):
    """The rows of a survey with all that they have, and the names of the kernels that were chosen."""
    for row in data["rows"]:
        row = {key: value for key, value in {**data["every"], **row}.items() if value is not None}
        yield {**row, "chosen": data["kernels"][row["chosen"]]} if "chosen" in row else row


def compact(data):
    """The survey of a benchmark."""
    rows = {}
    for r in data["results"]:
        kept = {key: r[key] for key in KEPT if key in r and r[key] != BACK_TO_BACK}
        row = rows.setdefault(json.dumps(kept), {**kept, "bytes": round(r["gbytes_per_s"] * r["median_us"] * 1e3), "us": {}})
        row["us"][r["kernel"]] = digits(r["median_us"])
        if r.get("chosen", True):
            row["chosen"] = r["kernel"]
        if r["baselines"]:
            row["baselines"] = {name: digits(us) for name, us in r["baselines"].items()}
    kernels = sorted({kernel for row in rows.values() for kernel in row["us"]})
    for row in rows.values():
        row["us"] = shorter(row["us"], kernels)
        if "chosen" in row:
            row["chosen"] = kernels.index(row["chosen"])
    head = {key: value for key, value in data.items() if key not in ("schema", "results")}
    every, short = shortened(list(rows.values()))
    return {"survey": 3, **head, "kernels": kernels, "every": every, "rows": short}


def times(data, row):
    """The time of each kernel that was measured."""
    if isinstance(row["us"], dict):
        return {data["kernels"][int(i)]: us for i, us in row["us"].items()}
    return {kernel: us for kernel, us in zip(data["kernels"], row["us"]) if us is not None}


def operations(row):
    """Multiplications and additions; a decoder's block has those of its four products."""
    if "block" not in row or row["name"] != "block":
        return 2 * row["m"] * row["n"] * row["k"]
    block = row["block"]
    q, kv = block["heads"] * block["head_dim"], block["kv_heads"] * block["head_dim"]
    return 2 * row["m"] * block["hidden"] * (2 * q + 2 * kv + 3 * block["intermediate"])


def expand(data):
    """A survey's rows as results, one a kernel; whatever has none, as it is. Shares are of the device's ceilings: reads, and 16-bit products."""
    if "survey" not in data:
        return data
    device, results = data["device"], []
    for row in whole(data):
        for kernel, us in times(data, row).items():
            memory = 100 * row["bytes"] / (us * 1e3 * device["read_gbytes_per_s"])
            compute = 100 * operations(row) / (us * 1e3 * device["f16_gflops"]) if device["f16_gflops"] > 0 else 0.0
            results.append({**{key: row[key] for key in KEPT if key in row}, "kernel": kernel, "median_us": us, "chosen": kernel == row.get("chosen"),
                            "baselines": row.get("baselines", {}), "gbytes_per_s": row["bytes"] / (us * 1e3),
                            "ceiling_gbytes_per_s": device["read_gbytes_per_s"], "memory_percent": memory, "compute_percent": compute,
                            "roofline_percent": max(memory, compute)})
    return {**{key: value for key, value in data.items() if key not in ("every", "rows")}, "results": results}


def text(data, rows="rows"):
    """JSON with one of data[rows] a line."""
    head = json.dumps({key: value for key, value in data.items() if key != rows}, ensure_ascii=False, indent=1)
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in data[rows])
    return f'{head.removesuffix("}").rstrip()},\n "{rows}": [\n{lines}\n ]\n}}\n'


def main():
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    refused = 0
    for path in map(pathlib.Path, sys.argv[1:]):
        data = json.loads(path.read_text())
        if "schema" not in data or "results" not in data:
            continue
        if data["commit"].endswith("-dirty"):
            print(f"{path}: measured at {data['commit']}, with changes that no commit has; commit them and measure again", file=sys.stderr)
            refused += 1
            continue
        path.write_text(text(compact(data)))
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
