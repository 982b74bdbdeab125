#!/usr/bin/env python3
"""Renders the tables and pictures of the documentation from committed JSON, and its programs from files, so that nothing in a document is
typed.

A block in a Markdown file looks like this, and everything between the two comments is generated:

    <!-- render: bench bench/results/cpu.json -->
    <!-- end -->

`source FILE` is a whole program, `source FILE#PART` the lines of it between "docs: begin PART" and "docs: end PART". Of a table,
FILE#REGEX is the rows whose name, scheme, kind, peak, kernel or operation begins so. A block of several files has commas between them.

usage: docs/render.py [--check] [--nibble PATH]

--check         change nothing, exit 1 when a block is out of date
--nibble PATH   first refresh what the tool says of itself: its kernels, layouts and formats (docs/results/registry.json), and which
                weights run on which machines (docs/results/support.json)
"""

import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import survey  # noqa: E402
PROGRAM = re.compile(r"^```(?:c|cpp|python|cmake)\n(.*)", re.MULTILINE)  # and its first line
BLOCK = re.compile(r"(<!-- render: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


PEAK_UNITS = {"f32": "GFLOP/s", "bf16": "GFLOP/s", "int8": "Gop/s"}
PEAK_FIELDS = {"f32": "f32_gflops", "bf16": "bf16_gflops", "int8": "int8_gops"}


def table(header, rows, numbers=True):
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("--:" if numbers and i > 0 else "---" for i in range(len(header))) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def microseconds(us):
    return f"{us / 1000:.2f} ms" if us >= 10000 else f"{us:.0f} µs"


def speed_up(r):
    """Over the fastest of the baselines that were measured; a dash where their times were not believed."""
    if r["baselines"]:
        return f" · **{min(r['baselines'].values()) / r['median_us']:.2f}×**"
    return " · –" if r.get("baselines_left_out") else ""


def bench(data):
    """A row per layer, a column per M: time, % of the roofline, speed-up over the fastest baseline."""
    columns = sorted({r["m"] for r in data["results"]})
    several_kernels = len({r["kernel"] for r in data["results"]}) > 1
    layers = {}
    for r in data["results"]:
        layers.setdefault((r["name"], r["n"], r["k"], r["scheme"], r["a_dtype"], r["kernel"]), {})[r["m"]] = r
    rows = []
    for (name, n, k, scheme, act, kernel), cells in layers.items():
        row = [f"{name} {n}×{k} `{scheme}` × {act}" + (f", `{kernel.split('__')[1]}`" if several_kernels else "")]
        for m in columns:
            r = cells.get(m)
            if r is None:
                row.append("")
                continue
            row.append(f"{microseconds(r['median_us'])} · {r['roofline_percent']:.0f} %" + speed_up(r))
        rows.append(row)
    device = data["device"]
    baselines = sorted({b for r in data["results"] for b in r["baselines"]})
    over = f"the fastest of {', '.join(baselines)}" if len(baselines) > 1 else "".join(baselines)
    peaks = [p for p in PEAK_UNITS if any(r.get("peak", "f32") == p for r in data["results"])]
    note = (f"\n{device['cpu']}, {device['isa']}, {device['threads']} threads; measured roofline {device['read_gbytes_per_s']:.0f} GB/s"
            f" and {' and '.join(f'{device[PEAK_FIELDS[p]]:.0f} {PEAK_UNITS[p]} ({p})' for p in peaks)}; commit {data['commit']}, {data['date'][:10]}. Cold weights, medians. Each cell: "
            "time · % of the roofline" + (f" · speed-up over {over}" if baselines else "") + ".\n")
    return table(["layer"] + [f"M = {m}" for m in columns], rows) + note


def cpu_modes(data):
    """A row per mode, a column per M: the median over the layers of the share of a ceiling and of the speed; M = 1 is held against
    the bandwidth, larger M against the mode's peak."""
    if data is None:
        return "Not measured yet: `./dev bench cpu` measures it, `./dev docs` puts it here.\n"
    columns = sorted({r["m"] for r in data["results"]})
    modes = {}
    for r in data["results"]:
        modes.setdefault((r["scheme"], r["a_dtype"], r["peak"]), {}).setdefault(r["m"], []).append(r)
    rows = []
    for (scheme, act, peak), cells in modes.items():
        row = [f"`{scheme}` × {act}", peak]
        for m in columns:
            layers = cells.get(m, [])

            def middle(field):
                return statistics.median(r[field] for r in layers)

            if not layers:
                row.append("")
            elif m == 1:
                row.append(f"{middle('memory_percent'):.0f} % · {middle('gbytes_per_s'):.1f} GB/s")
            else:
                text = f"{middle('compute_percent'):.0f} % · {middle('gflops'):.0f} {PEAK_UNITS[peak]}"
                if sum(r["bound"] == "memory" for r in layers) * 2 > len(layers):
                    text += f" · {middle('memory_percent'):.0f} % of reads"
                row.append(text)
        rows.append(row)
    device = data["device"]
    peaks = [p for p in PEAK_UNITS if any(r["peak"] == p for r in data["results"])]
    layers = list(dict.fromkeys(f"{r['name']} {r['n']}×{r['k']}" for r in data["results"]))
    note = (f"\n{device['cpu']}, {device['isa']}, {device['threads']} threads; ceilings at best {device['read_gbytes_per_s']:.0f} GB/s"
            + "".join(f", {device[PEAK_FIELDS[p]]:.0f} {PEAK_UNITS[p]} {p}" for p in peaks)
            + f"; commit {data['commit']}, {data['date'][:10]}. Medians over {', '.join(layers)}. M = 1: % of the bandwidth · GB/s; larger M: % of "
            "the peak named · speed · % of the bandwidth where that is the nearer ceiling.\n")
    return table(["mode", "peak"] + [f"M = {m}" for m in columns], rows) + note


def cpu_peers(data):
    """A row per mode, a column per M: the best other library's time over nibble's, geometric mean over the layers, and which it was most often."""
    if data is None:
        return "Not measured yet: `./dev peers` measures it, `./dev docs` puts it here.\n"
    columns = sorted({r["m"] for r in data["results"]})
    cells = {}
    for r in data["results"]:
        peers = {name: us for name, us in r["us"].items() if name != "nibble"}
        if peers and "nibble" in r["us"]:
            best = min(peers, key=peers.get)
            cells.setdefault((r["mode"], r["m"]), []).append((peers[best] / r["us"]["nibble"], best))

    def cell(mode, m):
        ratios = cells.get((mode, m), [])
        if not ratios:
            return ""
        return f"{statistics.geometric_mean(ratio for ratio, _ in ratios):.2f}× · {statistics.mode(best for _, best in ratios)}"

    def name(mode):
        scheme, *act = mode.split(" × ")
        return " × ".join([f"`{scheme}`", *(act or ["f32"])])

    body = [[name(mode)] + [cell(mode, m) for m in columns] for mode in dict.fromkeys(mode for mode, _ in cells)]
    least = min((ratio, mode, m, best) for (mode, m), ratios in cells.items() for ratio, best in ratios)
    layers = list(dict.fromkeys(f"{r['n']}×{r['k']}" for r in data["results"]))
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if name != "nibble")
    return (table(["mode"] + [f"M = {m}" for m in columns], body) + f"\n{data['device']['cpu']}, {data['device']['isa']}, {data['device']['threads']} threads; "
            f"{versions}; commit {data['commit']}, {data['date'][:10]}. The best library's time over nibble's, geometric mean over {', '.join(layers)}, and which it was most "
            f"often. The least ratio of a layer is {least[0]:.2f}: {name(least[1])}, M = {least[2]}, {least[3]}.\n")


def accuracy(data):
    rows = [[f"`{r['scheme']}`" + (" + clip search" if r["clip_search"] else ""), f"{r['bits_per_weight']:.2f}",
             f"{r['sqnr_db']['min']:.1f}", f"{r['sqnr_db']['median']:.1f}", f"{r['sqnr_db']['max']:.1f}", f"{r['cosine_min']:.5f}"]
            for r in data["rows"]]
    header = ["scheme", "bits per weight", "SQNR worst layer, dB", "median", "best", "worst cosine"]
    return table(header, rows) + f"\n{data['model']}, {data['modules']} linear layers.\n"


def added_error(data):
    """A row per way of quantizing activations, a column per kind of activations: median and worst layer."""
    ways = list(dict.fromkeys(w["way"] for s in data["series"] for w in s["ways"]))
    cells = [{w["way"]: f"{100 * w['median']:.2f} % · {100 * w['worst']:.2f} %" for w in s["ways"]} for s in data["series"]]
    layers = max(w["layers"] for s in data["series"] for w in s["ways"])
    return (table(["activations as"] + [s["activations"] for s in data["series"]], [[f"`{way}`"] + [c.get(way, "") for c in cells] for way in ways])
            + f"\n‖D_q − D‖ / ‖D‖, the median layer · the worst, of the {layers} linear layers of {data['model']} with {data['weights']} weights. D is the result of the "
            f"same weights with activations as they are. The last column: {data['tokens']} word pieces of {data['text']}.\n")


MARKS = [("#1f77b4", '<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{c}"/>'),
         ("#d62728", '<path d="M{x:.1f} {y:.1f}m-5 4.5h10l-5 -9.5z" fill="{c}"/>'),
         ("#2ca02c", '<rect x="{l:.1f}" y="{t:.1f}" width="8" height="8" fill="{c}"/>')]


def added_error_picture(data):
    """A mark at the median layer and a line up to the worst, per way and kind of activations; logarithmic."""
    ways = list(dict.fromkeys(w["way"] for s in data["series"] for w in s["ways"]))
    values = [w[key] for s in data["series"] for w in s["ways"] for key in ("median", "worst")]
    low, high = 0.8 * min(values), 1.25 * max(values)
    left, right, top, bottom = 62, 740, 40, 330

    def height(value):
        return bottom - (bottom - top) * math.log(value / low) / math.log(high / low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 420" font-family="sans-serif" font-size="12" role="img" '
           f'aria-label="Error added by quantizing activations, by way and kind of activations">',
           '<rect width="760" height="420" fill="#fff"/>',
           '<text x="62" y="22" font-size="14" font-weight="bold">Error that quantizing activations adds to a layer (relative L2)</text>']
    for tick in (t * 10.0 ** e for e in range(-5, 1) for t in (1, 2, 5)):
        if low <= tick <= high:
            y = height(tick)
            out.append(f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
                       f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{100 * tick:g} %</text>')
    step = (right - left) / len(ways)
    for i, way in enumerate(ways):
        middle = left + (i + 0.5) * step
        out.append(f'<text x="{middle:.1f}" y="{bottom + 20}" text-anchor="middle" font-family="monospace">{way}</text>')
        for j, series in enumerate(data["series"]):
            for w in series["ways"]:
                if w["way"] != way:
                    continue
                x, y, (colour, mark) = middle + 16 * (j - 1), height(w["median"]), MARKS[j]
                out.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x:.1f}" y2="{height(w["worst"]):.1f}" stroke="{colour}" stroke-width="2"/>'
                           + mark.format(x=x, y=y, l=x - 4, t=y - 4, c=colour))
    for j, series in enumerate(data["series"]):
        x, y, (colour, mark) = left + 5, bottom + 44 + 18 * j, MARKS[j]
        out.append(mark.format(x=x, y=y, l=x - 4, t=y - 4, c=colour) + f'<text x="{x + 12}" y="{y + 4}">{series["activations"]}</text>')
    out.append(f'<text x="{right}" y="{bottom + 48}" text-anchor="end" fill="#555">mark: median of the layers of {data["model"]}, '
               f'{data["weights"]}; line: to the worst</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


README_COLUMNS = (1, 16, 64, 256)


def beside_peers(data):
    """{M: of every mode and layer the time of the fastest other library over nibble's}."""
    found = {}
    for r in data["results"]:
        if peers := [us for name, us in r["us"].items() if name != "nibble"]:
            found.setdefault(r["m"], []).append(min(peers) / r["us"]["nibble"])
    return dict(sorted(found.items()))


def speed_ups(data):
    """{M: speed-ups of the layers of the first mode, each over the fastest baseline}."""
    scheme, act = modes_of(data)[0]
    found = {}
    for r in data["results"]:
        if (r["scheme"], r["a_dtype"]) == (scheme, act) and r["baselines"]:
            found.setdefault(r["m"], []).append(min(r["baselines"].values()) / r["median_us"])
    return dict(sorted(found.items()))


def machine(data):
    device = data["device"]
    return device["gpu"] if "gpu" in device else f"{device['cpu']}, {device['threads']} threads"


def speed(data):
    """A row per layer of one model: time in microseconds and speed-up."""
    def cell(r):
        if r is None:
            return ""
        us = r["median_us"]
        ratio = f"**{min(r['baselines'].values()) / us:.1f}×**" if r["baselines"] else "–"
        return f"{us:{'.1f' if us < 100 else ',.0f'}} ({ratio})"

    scheme, act = modes_of(data)[0]
    layers = {}
    for r in data["results"]:
        if (r["scheme"], r["a_dtype"]) == (scheme, act) and r["name"].startswith("8b_"):
            layers.setdefault((r["name"].removeprefix("8b_"), r["n"], r["k"]), {})[r["m"]] = r
    rows = [[f"{name} {n}×{k}"] + [cell(cells.get(m)) for m in README_COLUMNS] for (name, n, k), cells in layers.items()]
    return table(["layer N×K"] + [f"M = {m}" for m in README_COLUMNS], rows)


def speed_picture(gpu_data, cpu_data):
    """The speed-up over M, a panel per machine: a line through the median layers, a band from the slowest to the fastest."""
    width, height, top, bottom = 840, 372, 92, 300
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" '
           f'font-size="13" fill="#24292f" role="img" aria-label="Speed-up of nibble over cuBLAS in f16 on a GPU, and over the fastest library for quantized weights on a CPU, by number of tokens">',
           f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#fff" stroke="#d0d7de"/>',
           '<text x="24" y="30" font-size="16" font-weight="bold">How many times as fast as what there is otherwise</text>']
    scheme, act = modes_of(gpu_data)[0]
    modes = len({r["mode"] for r in cpu_data["results"]})
    cpu = re.sub(r"\(R\)| Processor", "", cpu_data["device"]["cpu"])
    others = len(cpu_data["versions"]) - 1
    panels = ((speed_ups(gpu_data), f"{machine(gpu_data)}: {scheme} × {act}", "1× is cuBLAS in f16, without quantization", 70, 396, "#1a7f37"),
              (beside_peers(cpu_data), f"{cpu}, {cpu_data['device']['threads']} threads: {modes} modes", f"1× is the fastest of {others} other libraries", 490, 816, "#0969da"))
    for found, title, one, left, right, colour in panels:
        steps, ticks = math.log2(max(found)), range(math.ceil(max(map(max, found.values()))) + 1)

        def x(m):
            return left + 18 + (right - left - 36) * math.log2(m) / steps

        def y(value):
            return bottom - (bottom - top) * value / max(ticks)

        out.append(f'<text x="{left}" y="58" font-weight="bold">{title}</text>'
                   f'<text x="{left}" y="76" fill="#57606a">{one}</text>')
        for tick in ticks:
            out.append(f'<line x1="{left}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}" stroke="#eaeef2"/>'
                       f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end" fill="#57606a">{tick}×</text>')
        out.append(f'<line x1="{left}" y1="{y(1):.1f}" x2="{right}" y2="{y(1):.1f}" stroke="#57606a" stroke-dasharray="5 4"/>')
        band = [f"{x(m):.1f},{y(max(v)):.1f}" for m, v in found.items()] + [f"{x(m):.1f},{y(min(v)):.1f}" for m, v in reversed(found.items())]
        line = [(x(m), y(statistics.median(v)), statistics.median(v)) for m, v in found.items()]
        out.append(f'<polygon points="{" ".join(band)}" fill="{colour}" fill-opacity="0.14"/>'
                   f'<polyline points="{" ".join(f"{px:.1f},{py:.1f}" for px, py, _ in line)}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        for px, py, value in line:
            out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{colour}"/>'
                       f'<text x="{px + 3:.1f}" y="{py - 10:.1f}" text-anchor="middle" font-weight="bold" fill="{colour}">{value:.1f}</text>')
        for m in found:
            out.append(f'<text x="{x(m):.1f}" y="{bottom + 18}" text-anchor="middle">{m}</text>')
        middle, between = (left + right) / 2, (top + bottom) / 2
        out.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">M (tokens)</text>'
                   f'<text x="{left - 44}" y="{between}" text-anchor="middle" transform="rotate(-90 {left - 44} {between})">speed-up (×)</text>')
    out.append(f'<text x="24" y="{height - 12}" font-size="12" fill="#57606a">Line: the median of the layers, on the CPU of all modes; band: from the slowest to the fastest. Weights are read from memory.</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def bandwidth(data):
    """Of an operation without a product: a row per kernel, scheme and types, a column per matrix; time, GB/s and share of the bandwidth."""
    if data is None:
        return "Not measured yet: `./dev gpu` measures it, `./dev docs` puts it here.\n"
    rows, columns = {}, {}
    for r in data["results"]:
        quantizes = r["operation"] == "quantize"
        order = "" if quantizes else " [K,N]" if r.get("transposed") else " [N,K]"
        key = f"`{r['scheme']}`", f"{r['a_dtype']} → {r['d_dtype']}" if quantizes else r["d_dtype"] + order, f"`{r['kernel']}`"
        column = f"{r['m' if quantizes else 'n']}×{r['k']}"
        columns[column] = None
        rows.setdefault(key, {})[column] = f"{r['median_us']:.1f} · {r['gbytes_per_s']:.0f} · {r['memory_percent']:.0f} %"
    device = data["device"]
    name = device["gpu"] if "gpu" in device else f"{device['cpu']}, {device['isa']}, {device['threads']} threads"
    return (table(["scheme", "types", "kernel", *columns], [[*key, *(cells.get(c, "") for c in columns)] for key, cells in rows.items()])
            + f"\n{name}; commit {data['commit']}, {data['date'][:10]}. µs · GB/s · % of the {device['read_gbytes_per_s']:.0f} GB/s that reads reach. Cold inputs and "
            "outputs, medians.\n")


def gpu_table(data, scheme, act):
    """A row per shape of one mode on a GPU: the floor at M = 1, and for each M time, share of the roofline and the ratio to the
    baseline. Of several kernels the one chosen."""
    shapes = {}
    for r in data["results"]:
        if (r["scheme"], r["a_dtype"]) == (scheme, act) and r.get("chosen", True):
            shapes.setdefault((r["n"], r["k"]), {})[r["m"]] = r
    columns = sorted({m for cells in shapes.values() for m in cells})

    def cell(r):
        return f"{r['median_us']:.1f} · {r['roofline_percent']:.0f} %" + speed_up(r)

    rows = []
    for (n, k), cells in shapes.items():
        first = cells[min(cells)]
        floor = first["median_us"] * first["gbytes_per_s"] / first["ceiling_gbytes_per_s"]
        rows.append([f"{n}×{k}", f"{floor:.1f}"] + [cell(cells[m]) if m in cells else "" for m in columns])
    return table(["N×K", "floor"] + [f"M = {m}" for m in columns], rows)


def gpu_note(data):
    device = data["device"]
    peak = f" and {device['f16_gflops'] / 1000:.0f} TFLOP/s (f16)" if device["f16_gflops"] > 0 else ""
    return (f"\n{device['gpu']}; measured roofline {device['read_gbytes_per_s']:.0f} GB/s{peak}; baseline {data['baseline'] or 'none'}; commit "
            f"{data['commit']}, {data['date'][:10]}. Cold weights, medians. Times in µs; "
            "shares are of the roofline; speed-ups are over the baseline; floor: bytes at M = 1 / measured bandwidth.\n")


def modes_of(data):
    return list(dict.fromkeys((r["scheme"], r["a_dtype"]) for r in data["results"]))


CALLS = {"isolated": "isolated", "chain": "in a chain"}


def gpu_modes(data):
    """Every mode of a benchmark on a GPU."""
    if data is None:
        return "Not measured yet: `./dev gpu` measures it, `./dev docs` puts it here.\n"
    text = ""
    for calls in "results", "isolated", "chain":
        part = {**data, "results": data.get(calls, [])}
        text += "".join(f"`{scheme}` × {act}{'' if calls == 'results' else ', calls ' + CALLS[calls]}:\n\n{gpu_table(part, scheme, act)}\n" for scheme, act in modes_of(part))
    return text + gpu_note(data).lstrip("\n")


def gpu_layers(products, glu, norm):
    """A decoder's layers, calls isolated: the product alone, and what a glu or a norm adds to it."""
    if products is None or glu is None or norm is None:
        return "Not measured yet: `./dev gpu` measures it, `./dev docs` puts it here.\n"
    times = [{(r["name"], r["scheme"], r["m"]): r["median_us"] for r in data["isolated"]} for data in (products, glu, norm)]
    columns = sorted({m for _, _, m in times[0]})

    def cell(key):
        added = [("" if key not in part else f"{part[key] - times[0][key]:+.1f}") or "–" for part in times[1:]]
        return f"{times[0][key]:.1f} · {added[0]} · {added[1]}"

    layers = list(dict.fromkeys((name, scheme) for name, scheme, _ in times[2]))
    body = [[name, f"`{scheme}`"] + [cell((name, scheme, m)) for m in columns] for name, scheme in layers]
    return table(["layer", "scheme"] + [f"M = {m}" for m in columns], body) + gpu_note(products)


def gpu_block(data):
    """A decoder's block: its four products, each alone, and the whole with its share of the roofline, in every way of calling."""
    if data is None:
        return "Not measured yet: `./dev gpu` measures it, `./dev docs` puts it here.\n"
    names, body = ["qkv", "o", "gate_up", "down"], []
    ways = {"results": "back to back", **CALLS}
    for scheme, m in dict.fromkeys((r["scheme"], r["m"]) for r in data["results"]):
        for calls in ways:
            part = {r["name"]: r for r in data.get(calls, []) if (r["scheme"], r["m"]) == (scheme, m)}
            if part:
                times = [f"{part[name]['median_us']:.1f}" for name in names]
                body.append([f"`{scheme}`", str(m), ways[calls], *times, f"{part['block']['median_us']:.1f} · {part['block']['roofline_percent']:.0f} %"])
    return table(["scheme", "M", "calls", *names, "block"], body) + gpu_note(data)


def gpu_gemm(*surveys):
    """The fastest of all kernels: a row per layer, a column per M; time, share of the roofline, speed-up over cuBLAS, kernel."""
    if None in surveys:
        return "Not measured yet.\n"
    cells = {}
    for r in (r for data in surveys for r in data["results"]):
        layer = cells.setdefault((r["n"], r["k"]), {})
        if r["m"] not in layer or r["median_us"] < layer[r["m"]]["median_us"]:
            layer[r["m"]] = r
    columns = sorted({m for layer in cells.values() for m in layer})

    def cell(r):
        kernel = r["kernel"].split("__cuda_")[1].replace("sm90_", "", 1).replace("n64k128", "")
        return f"{r['median_us']:.1f} · {r['roofline_percent']:.0f} %{speed_up(r)}<br>`{kernel}`"

    body = [[f"{n}×{k}"] + [cell(layer[m]) if m in layer else "" for m in columns] for (n, k), layer in cells.items()]
    device, commits = surveys[0]["device"], ", ".join(dict.fromkeys(data["commit"] for data in surveys))
    return (table(["N×K"] + [f"M = {m}" for m in columns], body)
            + f"\n{device['gpu']}; `{surveys[0]['results'][0]['scheme']}` × {surveys[0]['results'][0]['a_dtype']}; commit {commits}. µs · % of the roofline "
            f"({device['read_gbytes_per_s']:.0f} GB/s, {device['f16_gflops'] / 1000:.0f} TFLOP/s) · speed-up over {surveys[0]['baseline']}; below, the fastest kernel. "
            "Cold weights, medians.\n")


def gpu_survey(*surveys):
    """The same layers on several GPUs: a row per layer, a column per M; the fastest kernel's time on each, and its share of that GPU's roofline."""
    if None in surveys:
        return "Not measured yet.\n"
    shown = (1, 8, 16, 64, 128, 256, 512, 1024, 4096)

    def fastest(data, n, k, m):
        return min((r for r in data["results"] if (r["n"], r["k"], r["m"]) == (n, k, m)), key=lambda r: r["median_us"])

    layers = list(dict.fromkeys((r["n"], r["k"]) for r in surveys[0]["results"]))
    body = [[f"{n}×{k}"] + ["<br>".join(f"{r['median_us']:.1f} · {r['roofline_percent']:.0f} %" for r in (fastest(data, n, k, m) for data in surveys))
                           for m in shown] for n, k in layers]
    devices = "; below, ".join(f"{data['device']['gpu']} ({data['device']['read_gbytes_per_s']:.0f} GB/s, {data['device']['f16_gflops'] / 1000:.0f} TFLOP/s of f16)"
                               for data in surveys)
    first = surveys[0]["results"][0]
    return (table(["N×K"] + [f"M = {m}" for m in shown], body)
            + f"\n{devices}. `{first['scheme']}` × {first['a_dtype']} to {first['d_dtype']}; commit {surveys[0]['commit']}. µs · % of the roofline of f16; cold weights, "
            "medians, the fastest kernel.\n")


def ggml_products(data):
    """A row per layer and type, a column per number of tokens: nibble's time, and how many times as long ggml's CPU backend takes."""
    tokens = list(dict.fromkeys(r["tokens"] for r in data["results"]))
    rows = {}
    for r in data["results"]:
        shape = f"{r['n']}×{r['k']}" + (f", {r['top_k']} of {r['experts']}" if r["experts"] > 1 else "")
        rows.setdefault((f"{r['layer']}, {shape}", r["type"].upper()), {})[r["tokens"]] = r
    body = [[layer, kind] + [f"{microseconds(row[t]['nibble_us'])} · **{row[t]['ggml_us'] / row[t]['nibble_us']:.2f}×**" for t in tokens]
            for (layer, kind), row in rows.items()]
    return (table(["layer", "type"] + [f"{t} token{'s' * (t > 1)}" for t in tokens], body)
            + f"\n{data['cpu']}, {data['isa']}, {data['threads']} threads; ggml {data['ggml']}. nibble's time · ggml's over it. Cold weights, medians.\n")


def by_turns(data):
    """A row per layer: the best round of the first kernel, and how many times as long the others' take."""
    first, *others = data["kernels"]
    body = []
    for r in data["results"]:
        least = {k: min(times) for k, times in r["median_us"].items()}
        middle = {k: statistics.median(times) for k, times in r["median_us"].items()}
        rate = 2e-3 * r["m"] * r["n"] * r["k"] / least[first]
        body.append([r["name"], f"{r['m']} × {r['n']} × {r['k']}", f"{microseconds(least[first])} · {rate:.0f}"]
                    + [f"{least[k] / least[first]:.2f}× ({middle[k] / middle[first]:.2f}×)" for k in others])
    device = data["device"]
    return (table(["layer", "M × N × K", f"`{first}`, µs · Gop/s"] + [f"`{k}` takes" for k in others], body)
            + f"\n{device['cpu']}, {device['threads']} thread" + "s" * (device["threads"] > 1) + f"; commit {data['commit']}, {data['date'][:10]}; "
            + "`bench/by_turns.py`: the best of each kernel's rounds; in brackets the middle ones, on a machine that others use too.\n")


def sibling(name):
    return read(f"bench/results/h200/{name}")


CONV_SCHEMES = ("u4b8g128", "s8t_s8c", "s8g128_u4b8g128")


def gpu_conv(*surveys):
    """A row per layer, a column per image layout and scheme: times, and speed-ups over cuDNN's in fp16 and that layout (conv-cudnn.json)."""
    peer = sibling("conv-cudnn.json")
    theirs = {(r["name"], r["batch"]): r["us"] for r in peer["runs"]}
    columns, layers = {}, {}
    for r in (r for data in surveys for r in data["results"] if r["scheme"] in CONV_SCHEMES):
        c = r["conv"]
        size = f"{c['batch']}×{c['in_channels']}×{c['height']}×{c['width']} → {r['n']}, {c['filter'][0]}×{c['filter'][1]}"
        us, fastest = r["median_us"], theirs[r["name"], c["batch"]][c["input"]]
        columns[c["input"], r["scheme"]] = None
        layers.setdefault(size, {})[c["input"], r["scheme"]] = f"{us:.1f} · {fastest / us:.2f}×"
    columns = sorted(columns, key=lambda c: (c[0] != "nhwc", CONV_SCHEMES.index(c[1])))
    body = [[size] + [cells.get(c, "") for c in columns] for size, cells in layers.items()]
    commits = ", ".join(dict.fromkeys(data["commit"] for data in surveys))
    return (table(["layer"] + [f"{layout.upper()} `{scheme}`" for layout, scheme in columns], body) +
            f"\n{surveys[0]['device']['gpu']}, f16 images in and out: µs · speed-up over cuDNN {peer['cudnn']} in fp16 and the same image layout; commit {commits}. Cold weights, "
            "warm images, medians; quantizing and reordering images are counted.\n")


def gpu_online(data):
    """A row per layer and act_scheme, a column per M: what a plan takes, next to the one with f16 activations of the same run."""
    us, layers = {}, {}
    for r in data["results"]:
        us[r["scheme"], r["n"], r["k"], r["m"]] = r["median_us"]
        layers.setdefault((r["n"], r["k"]), []).append(r["m"])
    schemes = list(dict.fromkeys(r["scheme"] for r in data["results"]))
    floats, columns = next(s for s in schemes if "_" not in s), sorted({m for ms in layers.values() for m in ms})

    def cell(scheme, n, k, m):
        return f"{us[scheme, n, k, m]:.1f} · {us[floats, n, k, m] / us[scheme, n, k, m]:.2f}×" if (scheme, n, k, m) in us else ""

    body = [[f"`{scheme}`", f"{n}×{k}"] + [cell(scheme, n, k, m) for m in columns] for scheme in schemes if scheme != floats for n, k in layers]
    return (table(["scheme", "N×K"] + [f"M = {m}" for m in columns], body)
            + f"\n{data['device']['gpu']}; commit {data['commit']}, {data['date'][:10]}. µs, quantizing counted · speed-up over `{floats}` × f16 in the same run.\n")


def gpu_f32(data):
    """A row per scheme and layer, a column per M: f32 activations, next to f16 ones of the same run."""
    us = {(r["scheme"], r["n"], r["k"], r["a_dtype"], r["m"]): r["median_us"] for r in data["results"]}
    layers, columns = list(dict.fromkeys(key[:3] for key in us)), sorted({key[4] for key in us})

    def cell(layer, m):
        return f"{us[*layer, 'f32', m]:.1f} · {us[*layer, 'f32', m] / us[*layer, 'f16', m]:.2f}×"

    body = [[f"`{scheme}`", f"{n}×{k}"] + [cell((scheme, n, k), m) for m in columns] for scheme, n, k in layers]
    return (table(["scheme", "N×K"] + [f"M = {m}" for m in columns], body)
            + f"\n{data['device']['gpu']}; commit {data['commit']}, {data['date'][:10]}. µs of f32 activations · times as long as of f16 ones in the same run.\n")


def generation(data):
    """A row per kind of weights: tokens per second and prefill of each batch and prompt, and how far logits are from the same numbers' as
    floats."""
    if data is None:
        return "Not measured yet: `bench/generate.py` on a machine with a GPU, PyTorch and transformers.\n"
    prompts = data["prompt"] if isinstance(data["prompt"], list) else [data["prompt"]]
    runs = {(r["weights"], r["batch"], r.get("prompt", prompts[0])): r for r in data["runs"] if "batch" in r}
    columns = list(dict.fromkeys((batch, prompt) for _, batch, prompt in runs))
    differences = {r["weights"]: f"{r['logits_relative_l2']:.1e} · {100 * r['same_argmax']:.1f} %" for r in data["runs"] if "batch" not in r}

    def cell(weights, *column):
        if (weights, *column) not in runs:
            return ""
        r = runs[weights, *column]
        ratio = r["tokens_per_second"] / runs[data["dtype"], *column]["tokens_per_second"]
        rate = r["tokens_per_second"]
        return f"{rate:.{0 if rate >= 10 else 1}f} · **{ratio:.2f}×** · {r['prefill_ms']:,.1f} ms"

    body = [[f"`{weights}`"] + [cell(weights, *column) for column in columns] + [differences.get(weights, "")]
            for weights in dict.fromkeys(weights for weights, _, _ in runs)]
    part = "" if data.get("layers") == data.get("all_layers") else f", {data['layers']} of its {data['all_layers']} blocks,"
    heads = [f"batch {batch}" + (f", prompt {prompt}" if len(prompts) > 1 else "") for batch, prompt in columns]
    return (table(["weights"] + heads + ["logits"], body) + f"\n{data['model']}{part} with random weights, {data['device']}, PyTorch "
            f"{data['torch']}; {data['tokens']} tokens after a prompt of {' or '.join(map(str, prompts))}{'' if 'threads' in data['device'] else ', a CUDA graph per token'}. Tokens per second · over {data['dtype']} · "
            "prefill. Logits: relative L2 distance from those of the same numbers as matrices · positions with the same next token.\n")


def serving(data):
    """A row per checkpoint, its activations and number of requests: time to the first token and tokens per second, with nibble and without."""
    if data is None:
        return "Not measured yet: `bench/serving.py`.\n"
    where = data.get("gpu") or f"{data['cpu']}, `{data['isa']}`, {data['threads']} threads"

    def cell(r):
        rate = r["tokens_per_second"]
        return f"{r['first_token_ms']:,.0f} ms · {rate:,.{0 if rate >= 100 else 1}f}"

    rows = []
    for run in data["runs"]:
        scheme, _, kind = run["scheme"].partition(" ")
        quantized = "int8" if scheme.startswith("s8") or (not kind and data.get("isa") == "amx") else "FP8" if scheme.startswith("e4m3") else "bf16"
        here, there = run["nibble"], run["vLLM"]
        rows.append([run["format"], f"`{scheme.split('_')[-1]}`", quantized, str(run["streams"]), cell(here), cell(there),
                     f"**{there['first_token_ms'] / here['first_token_ms']:.2f}×** · **{here['tokens_per_second'] / there['tokens_per_second']:.2f}×**"])
    return (table(["format", "weights", "activations", "requests at a time", "nibble", "vLLM's own kernels", "speed-up"], rows)
            + f"\n{data['model']} with random weights in bf16, {where}, vLLM {data['vllm']}, PyTorch {data['torch']}; {data['tokens']} tokens after "
            f"a prompt of {data['prompt']}, medians of {data['rounds']} rounds. Time to the first token · tokens per second of all requests after it.\n")


def experts(data):
    """A row per number of tokens, a column per scheme: the time of the layer, how fast it reads the weights of the experts that are hit, and what uneven routing costs."""
    if data is None:
        return "Not measured yet: `bench/moe.py` on a machine with a GPU and PyTorch.\n"
    cells = {(r["scheme"], r["routing"], r["tokens"]): r for r in data["results"]}
    schemes = list(dict.fromkeys(scheme for scheme, _, _ in cells))

    def cell(scheme, tokens):
        r, uneven = cells[scheme, "uniform", tokens], cells.get((scheme, "zipf", tokens))
        return (f"{r['us']:,.0f} µs · {r['gbytes_per_s']:,.0f} GB/s · {r['tflops']:.0f} TFLOPS · **{r['linear_us'] / r['us']:.1f}×**"
                + (f" · {uneven['us'] / r['us']:.2f}" if uneven else ""))

    body = [[f"{t:,}"] + [cell(scheme, t) for scheme in schemes] for t in dict.fromkeys(t for _, _, t in cells)]
    first = data["results"][0]
    return (table(["T"] + [f"`{scheme}`" for scheme in schemes], body) + f"\n{first['experts']} experts, {first['top_k']} a token, "
            f"{first['hidden']} → {first['intermediate']} → {first['hidden']}, {first['a_dtype']}; {data['device']}, PyTorch {data['torch']}. Time of the layer · weights of the experts that are hit, "
            "over it · products · over two linear plans for each expert hit, with the mean number of tokens"
            + (" · the time with routing by Zipf's law, over that with uniform routing" if any(routing == "zipf" for _, routing, _ in cells) else "") + ".\n")


def parallel(data):
    """A row per number of tokens, a column per pair of layers and scheme: all GPUs against one."""
    pairs = {}
    for r in data["results"]:
        pairs.setdefault((r["pair"], r["scheme"]), {})[r["m"]] = r

    def cell(r):
        waits = 100 * (1 - r["without_sum_us"] / r["shared_us"])
        return (f"{r['one_us']:,.0f} → {r['shared_us']:,.0f} · **{r['one_us'] / r['shared_us']:.2f}×** · {waits:.0f} % · "
                f"{r['f16_shared_us'] / r['shared_us']:.1f}×")

    counts = list(dict.fromkeys(r["m"] for r in data["results"]))
    rows = [[f"{m:,}"] + [cell(of_m[m]) for of_m in pairs.values()] for m in counts]
    return (table(["M"] + [f"{pair} `{scheme}`" for pair, scheme in pairs], rows) + f"\n{data['model']} on {data['ranks']} × {data['device']}, NCCL "
            f"{data['nccl']}, PyTorch {data['torch']}. µs on one GPU → on {data['ranks']} · speed-up, with the all-reduce · share of the all-reduce in the time · "
            f"over f16 matrices on {data['ranks']} GPUs.\n")


def call_cost(data):
    """A row per kind of call, a column per state of the package: microseconds."""
    if data is None:
        return "Not measured yet: `bench/call_cost.py --device cuda` on a machine with a GPU and PyTorch.\n"
    columns = data["columns"]
    rows = [[name] + [f"{column[name]['us']:.1f}" if name in column else "" for column in columns.values()]
            for name in next(iter(columns.values()))]
    return (table(["µs a call", *columns], rows) + f"\n64×64 `u4b8g32`, one token, kernel included; {data['device']}, one thread, Python "
            f"{data['python']}, PyTorch {data['torch']}. The least of {data['rounds']} interleaved rounds of {data['calls']} calls.\n")


def loading(data):
    """A row per format: milliseconds in one pass, what that is of the file, and of the two steps, reading and packing."""
    rows = [[f"`{r['format']}`", f"{r['weights'] / 1e6:,.0f} M", f"{r['load_ms']:.0f}", f"{r['bytes'] / 1e6 / r['load_ms']:.2f}",
             f"{r['read_ms']:.0f}", f"{r['pack_ms']:.0f}"] for r in data["results"]]
    return (table(["format", "weights", "one pass, ms", "GB/s of file", "read, ms", "pack, ms"], rows) + f"\n`bench/loading.py` on {data['cpu']}, `{data['isa']}`, "
            f"{data['threads']} threads, from the page cache; medians of {data['rounds']} rounds.\n")


def exactness(data):
    """A row per kernel and type of activations: the relative L2 error of ordinary and of outlier-ridden activations."""
    cells = {}
    for r in data["results"]:
        cells.setdefault((r["kernel"], r["a_dtype"]), {})[r["outliers"]] = r
    factors = sorted({r["outliers"] for r in data["results"]})
    header = ["kernel", "activations"] + ["Gaussian" if f == 1 else f"every 256th channel ×{f}" for f in factors]
    rows = [[f"`{kernel}`", act] + [f"{by[f]['relative_l2']:.1e} · {by[f]['worst_error_over_bound']:.3f}" for f in factors]
            for (kernel, act), by in cells.items()]
    r = data["results"][0]
    return (table(header, rows) + f"\nW[{r['n']},{r['k']}] `{r['scheme']}`, M={r['m']}, f32 outputs. Each cell: ‖D − exact‖ / ‖exact‖ · the worst "
            "element's error as a share of its bound.\n")


def part(file, name):
    """The lines of a file between its marks for `name`, without what all of them are set in by; the marks of other parts are left out."""
    lines = file.read_text().split("\n")
    marks = [[i for i, line in enumerate(lines) if re.fullmatch(rf"\W*docs: {mark} {name}\W*", line)] for mark in ("begin", "end")]
    if [len(m) for m in marks] != [1, 1] or marks[0] > marks[1]:
        raise SystemExit(f"{file.relative_to(ROOT)} has no part '{name}'")
    inside = [line for line in lines[marks[0][0] + 1 : marks[1][0]] if not re.fullmatch(r"\W*docs: (begin|end) \w+\W*", line)]
    return textwrap.dedent("\n".join(inside)) + "\n"


def source(file, name):
    """A program that the tests build and run, or a part of one."""
    language = {"hpp": "cpp", "py": "python", "txt": "cmake"}.get(file.suffix[1:], file.suffix[1:])
    return f"```{language}\n{part(file, name) if name else file.read_text()}```\n"


# Of a table FILE#REGEX: the list in the JSON, and the field that the expression matches.
ROWS = {"formats": ("formats", "name"), "accuracy": ("rows", "scheme"), "cpu_modes": ("results", "peak"), "gpu_gemm": ("results", "kernel"),
        "support": ("tables", "operation"), "activations": ("activations", "operation")}


def only(kind, data, pattern):
    rows, name = ROWS[kind]
    chosen = [row for row in data[rows] if re.match(pattern, row[name])]
    if not chosen:
        raise SystemExit(f"{kind} has no row '{pattern}'")
    return {**data, rows: chosen}


def kernels(data):
    return table(["kernel", "needs", "reads layout", "what it does"],
                 [[f"`{k['name']}`", k["isa"], f"`{k['layout']}`" if k["layout"] else "", k["summary"]] for k in data["kernels"]], numbers=False)


def layouts(data):
    return "".join(f"**`{l['name']}`**\n\n```\n{l['drawing'].strip()}\n```\n\n" for l in data["layouts"])


def formats(data):
    return table(["format", "what it is", "written"], [[f["name"], f["summary"], "yes" if f["can_write"] else ""] for f in data["formats"]],
                 numbers=False)


def support(data):
    """For machines that answer alike a table: a row for weights that do, a column for activations."""
    def code(names):
        return ", ".join(f"`{name}`" for name in names.split(", "))

    text = []
    for t in data["tables"]:
        on = "On " + ", ".join(f"**{machine}**" for machine in t["machines"])
        rows = [[code(row["weights"])] + row["cells"] for row in t["rows"]]
        text.append(on + (":\n\n" + table(["weights"] + [code(column) for column in t["columns"]], rows, numbers=False) if t["columns"]
                          else f", all of it: {t['rows'][0]['cells'][0]}.\n"))
    return "\n".join(text)


def refusals(data):
    return "".join(f"{i}. {reason}\n" for i, reason in enumerate(data["refusals"], 1))


def named(key, title, about):
    """A renderer of the list of that key: names and what is behind them."""
    return lambda data: table([title, about], [[f"`{row['name']}`", row["about"]] for row in data[key]], numbers=False)


def rooms(data):
    """The map that docs/rooms.py checks."""
    rows = [[f"`src/{room['room']}`", room["holds"], ", ".join(f"`{used}`" for used in room["uses"]) or "nothing"] for room in data["rooms"]]
    text = table(["room", "holds", "may include"], rows, numbers=False)
    if data["upward"]:
        text += (f"\n`./dev lint` checks every include against this map. {len(data['upward'])} includes still break it; docs/rooms.json lists them, "
                 "and the list only shrinks.\n")
    return text


RENDERERS = {
    "rooms": rooms,
    "bench": bench,
    "speed": speed,
    "cpu_modes": cpu_modes,
    "cpu_peers": cpu_peers,
    "gpu_modes": gpu_modes,
    "gpu_layers": gpu_layers,
    "gpu_block": gpu_block,
    "accuracy": accuracy,
    "kernels": kernels,
    "layouts": layouts,
    "formats": formats,
    "support": support,
    "refusals": refusals,
    "words": named("words", "cell", "what runs"),
    "machines": named("machines", "machine", "stands for"),
    "activations": named("activations", "activations", "are"),
    "experts": experts,
    "generation": generation,
    "serving": serving,
    "call_cost": call_cost,
    "loading": loading,
    "parallel": parallel,
    "exactness": exactness,
    "added_error": added_error,
    "bandwidth": bandwidth,
    "gpu_gemm": gpu_gemm,
    "gpu_survey": gpu_survey,
    "gpu_conv": gpu_conv,
    "gpu_online": gpu_online,
    "gpu_f32": gpu_f32,
    "by_turns": by_turns,
    "ggml_products": ggml_products,
}
PICTURES = {"docs/pictures/added-error.svg": (added_error_picture, "docs/results/added-error.json"),
            "docs/pictures/speed.svg": (speed_picture, "bench/results/h200/decode-bench.json", "bench/results/cpu-peers.json")}
MAY_BE_MISSING = {"bandwidth", "cpu_modes", "cpu_peers", "gpu_modes", "gpu_layers", "gpu_block", "gpu_gemm", "gpu_survey", "experts", "generation", "serving", "call_cost"}
REGISTRY = ROOT / "docs/results/registry.json"
SUPPORT = ROOT / "docs/results/support.json"


def registry(nibble):
    """What the tool says of itself, without what depends on the machine."""
    said = subprocess.run([nibble, "doctor", "--kernels", "--layouts", "--formats", "--json"], check=True, stdout=subprocess.PIPE).stdout
    data = json.loads(said)
    for kernel in data["kernels"]:
        del kernel["runs_here"]
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def matrix(nibble):
    """Its support matrix: the planner's answers, a line for each row."""
    said = subprocess.run([nibble, "doctor", "--matrix", "--json"], check=True, stdout=subprocess.PIPE).stdout
    text = json.dumps(json.loads(said)["matrix"], indent=1, ensure_ascii=False)
    return re.sub(r'("(?:machines|columns|cells)": )\[\s+("[^\]]*")\s+\]', lambda found: found[1] + "[" + re.sub(r"\n\s+", " ", found[2]) + "]", text) + "\n"


def read(file):
    """A file of results. Of a benchmark, `results` has those of calls back to back, `isolated` and `chain` the others."""
    data = survey.expand(json.loads((ROOT / file).read_text()))
    if isinstance(data, dict) and isinstance(results := data.get("results"), list):
        data = {**data, "results": survey.called(results), **{calls: survey.called(results, calls) for calls in CALLS}}
    return data


def render(page):
    text = page.read_text()

    def replace(match):
        begin, kind, path, end = match.groups()
        path, _, name = path.partition("#")
        if kind == "source":
            return begin + source(ROOT / path, name) + end
        # Only what takes long or a GPU to measure may be missing; its renderer knows.
        several = [None if kind in MAY_BE_MISSING and not (ROOT / file).exists() else read(file) for file in path.split(",")]
        return begin + RENDERERS[kind](*([only(kind, several[0], name)] if name and several[0] else several)) + end

    if typed := PROGRAM.search(BLOCK.sub("", text)):
        raise SystemExit(f"{page}: the program '{typed[1]}' is in no file that tests run; quote one: <!-- render: source FILE#PART -->")
    return text, BLOCK.sub(replace, text)


def main():
    arguments = sys.argv[1:]
    check = "--check" in arguments
    stale = []
    if "--nibble" in arguments:
        nibble = arguments[arguments.index("--nibble") + 1]
        for file, current in ((REGISTRY, registry(nibble)), (SUPPORT, matrix(nibble))):
            if file.exists() and file.read_text() == current:
                continue
            stale.append(str(file.relative_to(ROOT)))
            if not check:
                file.write_text(current)
    for path in [ROOT / "README.md", ROOT / "HACKING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        old, new = render(path)
        if old == new:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(new)
    for name, (draw, *sources) in PICTURES.items():
        path, new = ROOT / name, draw(*map(read, sources))
        if path.exists() and path.read_text() == new:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(new)
    if stale:
        print(("out of date, run ./dev docs: " if check else "rendered ") + ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
