#!/usr/bin/env python3
"""cuDNN's fp16 convolutions through PyTorch, on the layers of a file of `nibble bench --conv`: what quantized ones are compared with.

usage: bench/peers/conv_cudnn.py FILE... [--batch 1,32] [--json FILE]

Each layer runs in a graph over so many copies of its weight that none is in L2 any more; image and output stay warm, as with
`nibble bench`. The time is a replay's, divided by the launches in it, the median of nine. cuDNN chooses by measuring (torch.backends.cudnn.benchmark).
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

COLD_BYTES, MOST_COPIES = 256 << 20, 2048


def layers(path):
    for line in Path(path).read_text().splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        batch = None
        if "x" in words[2]:  # B C HxW …
            batch, words = int(words[0]), words[1:]
        c, hw, co, kernel, name, *options = words
        height, width = map(int, hw.split("x"))
        kernels = [int(k) for k in kernel.split("x")]
        pairs = dict(option.split("=") for option in options)
        if "," in pairs.get("padding", ""):
            continue  # PyTorch would pad the image first, in memory
        numbers = {key: [int(n) for n in pairs.get(key, default).split("x")]
                   for key, default in (("stride", "1"), ("padding", "0"), ("dilation", "1"))}
        numbers = {key: n * 2 if len(n) == 1 else n for key, n in numbers.items()} | {"groups": int(pairs.get("groups", 1))}
        yield {"name": name, "batch": batch, "c": int(c), "h": height, "w": width, "co": int(co),
               "kh": kernels[0], "kw": kernels[-1], **numbers}


def measure(layer, batch, memory_format):
    shape = batch, layer["c"], layer["h"], layer["w"]
    weight_shape = layer["co"], layer["c"] // layer["groups"], layer["kh"], layer["kw"]
    options = {key: layer[key] for key in ("stride", "padding", "dilation", "groups")}

    def random(shape):
        return torch.randn(shape, device="cuda", dtype=torch.half).to(memory_format=memory_format)

    x, first = random(shape), random(weight_shape)
    count = min(MOST_COPIES, max(3, -(-COLD_BYTES // (2 * first.numel()))))
    weights = [first] + [random(weight_shape) for _ in range(count - 1)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for w in weights[:3]:
            torch.conv2d(x, w, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            torch.conv2d(x, w, **options)  # its output is free again, and warm
    times = []
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    runs = []
    for path in args.files:
        for layer in layers(path):
            for batch in [layer["batch"]] if layer["batch"] else [int(b) for b in args.batch.split(",")]:
                times = {name: measure(layer, batch, form)
                         for name, form in (("nchw", torch.contiguous_format), ("nhwc", torch.channels_last))}
                runs.append({**layer, "batch": batch, "us": times})
                print(f"{layer['name']:28} batch {batch:3}  NCHW {times['nchw']:8.1f} µs  NHWC {times['nhwc']:8.1f} µs", flush=True)
    if args.json:
        result = {"kind": "conv-cudnn", "gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version(),
                  "torch": torch.__version__, "runs": runs}
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
