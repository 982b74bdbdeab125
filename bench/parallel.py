#!/usr/bin/env python3
"""The two layer pairs of a transformer's block, on one GPU and shared by all: column parallel, then row parallel with an all-reduce.

usage: torchrun --nproc-per-node 2 bench/parallel.py [--model llama-3-70b] [-M 1,16,64,256,1024,4096] [--schemes u4b8g128,s8r_s8c]
                                                     [--device cuda] [--json FILE]

MLP: silu(x · gateᵀ) ∘ (x · upᵀ), then down. Attention: q, k and v in one projection, then o of as many of its channels as q has. f16
activations, random weights. Every rank also computes the whole pair, so that all GPUs are busy in every measurement. What is measured is a
CUDA graph of as many copies of the pair as the L2 cache cannot hold; candidates take turns in a random order, and the slowest rank counts.

Before it is measured, each pair is checked: the shared result must be the same on all ranks and in every run, and differ from that of one
GPU by no more than roundings can explain (docs/accuracy.md). Exits with 1 where it does not. On the CPU, with Gloo, there is only the check.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import random
import statistics
import sys

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import nibble.torch
from nibble.torch import ColumnParallelLinear, QuantLinear, RowParallelLinear, shard_inputs

# hidden, intermediate, channels of q, of k and v together
MODELS = {"tiny": (256, 512, 256, 128), "llama-3-8b": (4096, 14336, 4096, 2048), "llama-3-70b": (8192, 28672, 8192, 2048)}
ROUNDS, COLD_BYTES = 15, 256 << 20
U16, U24 = 2.0**-11, 2.0**-24  # units of f16 and f32


def layer(rng, n, k, scheme):
    """Random codes, and scales of one size, so that outputs are of the size of inputs."""
    if scheme == "u4b8g128":
        codes, scales, spread = rng.integers(0, 16, (n, k), dtype=np.uint8), (n, k // 128), 4.6
    elif scheme == "s8c":
        codes, scales, spread = rng.integers(1, 256, (n, k), dtype=np.uint8), (n, 1), 73.0  # −127 … 127, as bytes
        codes = np.where(codes == 128, 0, codes).astype(np.uint8)
    else:
        raise SystemExit(f"no weights of scheme {scheme} are made here; u4b8g128 or s8c")
    size = rng.uniform(0.75, 1.25, scales) / (spread * math.sqrt(k))
    return nibble.QuantTensor(scheme, codes, size.astype(np.float16))


def merged(first, second):
    """A layer with the output channels of both."""
    return nibble.QuantTensor(first.scheme, np.concatenate([first.codes, second.codes]), np.concatenate([first.scales, second.scales]))


class Pair:
    """The quantized layers of a pair. `wide` are the ones in front, which share x; `narrow` is the one behind."""

    def __init__(self, name, model, scheme, device):
        self.name, self.scheme, self.device = name, scheme, device
        self.act_scheme, _, weights = scheme.rpartition("_")
        hidden, intermediate, q, kv = MODELS[model]
        rng = np.random.default_rng(7)
        self.hidden, self.inner = hidden, intermediate if name == "mlp" else q
        if name == "mlp":
            self.wide = [layer(rng, intermediate, hidden, weights) for _ in range(2)]
        else:
            self.wide = [layer(rng, q, hidden, weights), layer(rng, kv, hidden, weights)]
        self.narrow = layer(rng, hidden, self.inner, weights)
        self.macs = sum(w.n * w.k for w in (*self.wide, self.narrow))

    def quantized(self, shared):
        """The pair as a function of x, of the whole layers or of this rank's share, and the function of the layer behind."""
        options = {"device": self.device, "act_scheme": self.act_scheme, "dtype": torch.float16}
        make = ColumnParallelLinear if shared else QuantLinear
        down = RowParallelLinear(self.narrow, input_is_parallel=True, **options) if shared else QuantLinear(self.narrow, **options)
        if self.name == "mlp":
            gate, up = (make(w, **options) for w in self.wide)
            inner = lambda x: gate.weight.linear(x, activation="silu", gate=up(x))
        else:
            q_channels = self.inner // (ranks() if shared else 1)
            if shared:
                rows = [np.arange(rank() * w.n // ranks(), (rank() + 1) * w.n // ranks()) for w in self.wide]
                qkv = make(merged(*self.wide), channels=np.concatenate([rows[0], self.wide[0].n + rows[1]]), **options)
            else:
                qkv = make(merged(*self.wide), **options)
            inner = lambda x: qkv(x)[..., :q_channels]
        return inner, down

    def floats(self, shared):
        """The same of f16 matrices."""
        part = (rank(), ranks()) if shared else (0, 1)
        rows = [torch.empty(w.n // part[1], w.k, dtype=torch.float16, device=self.device).normal_(0, w.k**-0.5) for w in self.wide]
        wide = torch.cat(rows)
        narrow = torch.empty(self.hidden, self.inner // part[1], dtype=torch.float16, device=self.device).normal_(0, self.inner**-0.5)
        if self.name == "mlp":
            inner = lambda x: (lambda both: F.silu(both[0]) * both[1])(F.linear(x, wide).chunk(2, -1))
        else:
            inner = lambda x: F.linear(x, wide)[..., : rows[0].shape[0]]
        return inner, lambda x: F.linear(x, narrow)


def rank():
    return dist.get_rank()


def ranks():
    return dist.get_world_size()


# ---- correctness


def roundings(q, x, act_scheme, parts):
    """How far the sum of the shares may be from the whole result, [M,N]: the error bounds of both on the products, the roundings of the
    shares' f16 results and of their sums, and of dynamic quantization what a share's own scale may move an activation by."""
    w = torch.from_numpy(np.array(nibble.pack(q).dequantize())).to(x.device, torch.float64)
    x = x.double()
    size = x.abs() @ w.abs().T
    shares = sum((x[:, k] @ w[:, k].T).abs() for k in parts)
    bound = 2 * 4 * (7 * math.sqrt(q.k) + 3) * U24 * size + U16 * ((2 + len(parts)) * shares + (x @ w.T).abs())
    if act_scheme:
        steps = (x.abs().amax(1, keepdim=True) / 127).expand_as(x).clone()
        for k in parts:
            steps[:, k] += x[:, k].abs().amax(1, keepdim=True) / 127
        return bound + 0.51 * steps @ w.abs().T
    group = q.group_shape[1]
    scales = torch.from_numpy(np.array(q.scales)).to(x.device, torch.float64).repeat_interleave(group, 1)
    bound += 2 * (4 + 2 * 128 / 8) * U24 * (x.abs() @ scales.T) * (15 + 8)  # Σa·q and z·Σa before they cancel, |q| + |z| of u4b8
    for m in range(len(x)):  # W rounded to f16, its scales too: λ·u_w·√(Σ (a·w)² + Σ_groups (Σ_group a·w)²), λ = 7
        products = w * x[m]
        squares = products.square().sum(1) + products.unflatten(1, (-1, group)).sum(2).square().sum(1)
        bound[m] += 2 * 7 * U16 * squares.sqrt()
    return bound


def check(pair):
    """What is wrong with the shared pair on this rank, and whether anything is on any. Every rank takes part in all exchanges."""
    wrong = []
    torch.manual_seed(3)
    x = torch.randn(4, pair.hidden, device=pair.device, dtype=torch.float16)
    (inner, down), (own_inner, own_down) = pair.quantized(False), pair.quantized(True)
    h = inner(x)
    share = [torch.empty_like(own_inner(x)) for _ in range(ranks())]
    dist.all_gather(share, own_inner(x).contiguous())
    limit = 2e-2 if pair.act_scheme else 4e-3
    if (off := distance(torch.cat(share, -1), h)) > limit:
        wrong.append(f"the column-parallel layers are {off:.1e} from one GPU's, more than {limit}")
    one = down(h)
    mine = h[:, own_down.channels].contiguous()
    runs = [own_down(mine).clone() for _ in range(3)]
    if not all(torch.equal(runs[0], y) for y in runs):
        wrong.append("the row-parallel layer differs from run to run")
    others = [torch.empty_like(one) for _ in range(ranks())]
    dist.all_gather(others, runs[0])
    if not all(torch.equal(others[0], y) for y in others):
        wrong.append("the row-parallel layer differs from rank to rank")
    step = pair.inner // ranks()
    parts = [shard_inputs(pair.narrow, i * step, (i + 1) * step)[1] for i in range(ranks())]
    over = ((runs[0].double() - one.double()).abs() / roundings(pair.narrow, h, pair.act_scheme, parts)).max().item()
    say(f"{pair.name} {pair.scheme}: the worst element of the sum of {ranks()} shares is at {over:.2f} of its bound")
    if not over <= 1:
        wrong.append(f"the row-parallel layer is at {over:.2f} of its bound")
    anywhere = torch.tensor([float(len(wrong))], device=pair.device)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    return wrong, anywhere.item() > 0


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- time


def graph_of(steps, copies):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # plans are made, workspaces and communicators allocated
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks the driver meanwhile
        for i in range(copies):
            steps[i % len(steps)]()
    return graph


def microseconds(graphs, copies):
    """The median of every graph's replays, in µs a pair; of the slowest rank."""
    order, times = random.Random(5), {name: [] for name in graphs}
    for turn in range(-2, ROUNDS):
        names = list(graphs)
        order.shuffle(names)  # alike on all ranks
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            graphs[name].replay()  # settles clocks, and hides the launch of the next
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].append(begin.elapsed_time(end) * 1e3 / copies)
    medians = torch.tensor([statistics.median(times[name]) for name in graphs], device="cuda")
    dist.all_reduce(medians, op=dist.ReduceOp.MAX)
    return dict(zip(graphs, medians.tolist()))


def without_sum(down):
    """A rank's half of a row-parallel layer."""
    return functools.partial(QuantLinear.forward, down) if isinstance(down, RowParallelLinear) else down


def measure(pair, counts):
    copies = max(2, math.ceil(COLD_BYTES / (pair.macs / 2 / ranks())))
    own = {"one": [pair.quantized(False) for _ in range(max(1, copies // ranks()))], "shared": [pair.quantized(True) for _ in range(copies)],
           "f16 one": [pair.floats(False)], "f16 shared": [pair.floats(True) for _ in range(2)]}  # fmt: skip
    for m in counts:
        x = torch.randn(m, pair.hidden, device=pair.device, dtype=torch.float16)
        graphs = {}
        for name, pairs in own.items():
            alone = [lambda inner=inner, down=down: without_sum(down)(inner(x)) for inner, down in pairs]
            graphs[name] = graph_of(alone, copies)
            if "shared" in name:
                graphs[f"{name}, sum"] = graph_of([lambda step=step: dist.all_reduce(step()) for step in alone], copies)
        y = torch.zeros(m, pair.hidden, device=pair.device, dtype=torch.float16)
        graphs["sum"] = graph_of([lambda: dist.all_reduce(y)], copies)
        us = microseconds(graphs, copies)
        row = {"pair": pair.name, "scheme": pair.scheme, "m": m, "one_us": us["one"], "shared_us": us["shared, sum"],
               "without_sum_us": us["shared"], "sum_us": us["sum"], "f16_one_us": us["f16 one"], "f16_shared_us": us["f16 shared, sum"]}  # fmt: skip
        row = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
        one, shared = row["one_us"], row["shared_us"]
        say(f"{pair.name:9} {pair.scheme:10} M={m:<5} one {one:8.1f} µs   shared {shared:8.1f} µs   {one / shared:.2f}×   "
            f"all-reduce {100 * (1 - row['without_sum_us'] / shared):3.0f} %   f16 {row['f16_one_us']:8.1f} → {row['f16_shared_us']:8.1f} µs")  # fmt: skip
        yield row
        del graphs


def say(text):
    if rank() == 0:
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-70b", choices=MODELS)
    parser.add_argument("-M", default="1,4,16,64,256,1024,4096", help="numbers of tokens")
    parser.add_argument("--schemes", default="u4b8g128,s8r_s8c")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=pathlib.Path, help="where the results go, too")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run it with torchrun, which says how many processes there are")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", device_id=device if args.device == "cuda" else None)
    results, failed = [], False
    for scheme in args.schemes.split(","):
        for name in ("mlp", "attention"):
            pair = Pair(name, args.model, scheme, device)
            problems, anywhere = check(pair)
            failed |= anywhere
            for problem in problems:
                print(f"rank {rank()}: {name} {scheme}: {problem}", file=sys.stderr)
            if not anywhere and args.device == "cuda":
                results.extend(measure(pair, [int(m) for m in args.M.split(",")]))
            del pair
    if args.json and results and rank() == 0:
        head = {"kind": "parallel", "model": args.model, "ranks": ranks(), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "rounds": ROUNDS}  # fmt: skip
        rows = ",\n".join("  " + json.dumps(row) for row in results)
        args.json.write_text(json.dumps(head, indent=1)[:-2] + f',\n "results": [\n{rows}\n ]\n}}\n')
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
