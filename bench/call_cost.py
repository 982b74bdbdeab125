#!/usr/bin/env python3
"""What a call from Python costs the host: a layer so small (64×64, u4b8g32, one token) that its kernel takes a microsecond or two, so that
what is left is Python, PyTorch's dispatcher, finding the plan and making the result. nn.Linear of the same size is next to it.

usage: bench/call_cost.py [--device cpu] [--column now] [--json FILE]

One thread. Every kind of call takes its turn in each of 31 rounds of 300 calls; the least and the median of the rounds, per call. On a GPU
the time is the host's, until everything is enqueued. --json replaces the column of that name in FILE, and leaves others. Needs PyTorch.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time

os.environ.setdefault("NIBBLE_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn

import nibble
import nibble.torch

ROUNDS, CALLS = 31, 300


def cases(device):
    """{name: (the mode it runs in, the call)}"""
    rng = np.random.default_rng(0)
    q = nibble.quantize(rng.standard_normal((64, 64), dtype=np.float32), "u4b8g32")
    channels = 16 if device.type == "cpu" else 32  # a GPU's smallest group
    kernel = nibble.quantize_conv(rng.standard_normal((channels, channels, 3, 3), dtype=np.float32), f"u4b8g{channels}")
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    dense = nn.Linear(64, 64, bias=False, device=device, dtype=dtype)
    layer = nibble.torch.QuantLinear(q, device=device)
    conv = nibble.torch.QuantConv2d(kernel, padding=1, device=device)
    w, packed, ops = layer.weight, layer.packed, torch.ops.nibble
    x = torch.randn(1, 64, device=device, dtype=dtype)
    asks, images, out = x.clone().requires_grad_(), torch.randn(1, channels, 4, 4, device=device, dtype=dtype), torch.empty_like(x)
    found = {
        "`nn.Linear`": (torch.no_grad, lambda: dense(x)),
        "`QuantLinear`": (torch.no_grad, lambda: layer(x)),
        "`QuantConv2d`": (torch.no_grad, lambda: conv(images)),
        "`PackedWeight.linear`": (torch.no_grad, lambda: w.linear(x)),
        "`PackedWeight.linear`, `out=`": (torch.no_grad, lambda: w.linear(x, out=out)),
        "`ops.nibble.linear`": (torch.no_grad, lambda: ops.linear(x, packed, 64)),
        "`ops.nibble.linear` in `inference_mode`": (torch.inference_mode, lambda: ops.linear(x, packed, 64)),
        "`nn.Linear`, x with gradient": (torch.enable_grad, lambda: dense(asks)),
        "`QuantLinear`, x with gradient": (torch.enable_grad, lambda: layer(asks)),
        "`ops.nibble.quantize_activations`": (torch.no_grad, lambda: ops.quantize_activations(x, "s8r")),
    }
    if device.type == "cpu":  # a GPU's 4-bit weights take codes in an order of their own
        codes, scales, _ = ops.quantize_activations(x, "s8r")
        found["`ops.nibble.scaled_linear`"] = torch.no_grad, lambda: ops.scaled_linear(codes, scales, None, packed, 64)
        array, place = x.numpy(), out.numpy()
        found["`PackedWeight.linear`, NumPy"] = torch.no_grad, lambda: w.linear(array)
        found["`PackedWeight.linear`, NumPy, `out=`"] = torch.no_grad, lambda: w.linear(array, out=place)
    return found


def measure(device):
    """{name: {"us", "median_us"}}"""
    calls, times = cases(device), {}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for turn in range(-2, ROUNDS):  # the first two only warm up
        for name, (mode, call) in calls.items():
            wait()
            with mode():
                start = time.perf_counter_ns()
                for _ in range(CALLS):
                    call()
                spent = time.perf_counter_ns() - start
            if turn >= 0:
                times.setdefault(name, []).append(spent / CALLS / 1e3)
    return {name: {"us": min(all_), "median_us": statistics.median(all_)} for name, all_ in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--column", default="now", help="what these times are called")
    parser.add_argument("--json", type=pathlib.Path, help="where the results go, too")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    column = measure(device)
    for name, row in column.items():
        print(f"{name:45} {row['us']:7.2f} µs   median {row['median_us']:7.2f}")
    if args.json:
        result = json.loads(args.json.read_text()) if args.json.exists() else {"kind": "call_cost", "columns": {}}
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else nibble.doctor()["cpu"]
        result.update(device=where, python=platform.python_version(), torch=torch.__version__, rounds=ROUNDS, calls=CALLS)
        result["columns"][args.column] = column
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
