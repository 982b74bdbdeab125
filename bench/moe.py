#!/usr/bin/env python3
"""Times a layer of experts (nibble.moe) on a GPU or the CPU, for routings that fall evenly or unevenly on its experts.

    bench/moe.py 128,8,4096,1536 --device cuda --tokens 1,16,64,1024,4096
    bench/moe.py 32,4,2880,2880 --scheme mxfp4 --tokens 1,16

mxfp4 is the scheme of gpt-oss: codes of e2m1 in groups of 32, whose scales are exponents, e8m0.
A call is one of 16 that follow one another, each with ids of its own, so that weights come from memory; on a GPU they are a CUDA graph. The median
of the rounds counts. Beside the time stand the share of the memory's bandwidth at which the weights of the experts that were hit were read, and
the time that linear() takes for the same two products, an expert's weight by the mean number of tokens, once for each expert hit.
"""

import argparse
import json
import statistics
import time
from typing import Any, Callable

import numpy as np
import torch

import nibble

CALLS = 16


def ids_of(routing: str, tokens: int, experts: int, top_k: int, seed: int) -> torch.Tensor:
    """[tokens, top_k]: experts drawn without repetition, with such probabilities."""
    random = np.random.default_rng(seed)
    p = np.ones(experts)
    if routing == "zipf":
        p = 1.0 / np.arange(1, experts + 1)
        random.shuffle(p)
    elif routing == "hot":
        p[0] = experts  # half of the tokens, about, have it first
    elif routing == "empty":
        p[experts // 2] = 0
    # The top_k largest of log p + Gumbel noise are a draw without repetition.
    with np.errstate(divide="ignore"):
        scores = np.log(p) + random.gumbel(size=(tokens, experts))
    return torch.from_numpy(np.ascontiguousarray(np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)))


def mxfp4(w: torch.Tensor) -> nibble.QuantTensor:
    """[N, K] rounded to MXFP4, as OCP's specification does it: the exponent of the largest of 32 weights becomes that of 4, the largest power of e2m1."""
    groups = w.float().unflatten(1, (-1, 32))
    exponents = torch.frexp(groups.abs().amax(-1).clamp(min=2.0**-100)).exponent - 1 - 2
    magnitudes = torch.ldexp(groups.abs(), -exponents[..., None])
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.bucketize(magnitudes, (values[1:] + values[:-1]) / 2) + 8 * (groups < 0)
    scales = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return nibble.QuantTensor("e2m1g32", codes.flatten(1).to(torch.uint8), scales)


def timed(run: Callable[[int], Any], device: str, rounds: int) -> float:
    """Seconds of a call, of CALLS different ones."""
    if device == "cpu":
        times = []
        for i in range(CALLS):
            run(i)
        for _ in range(rounds):
            start = time.perf_counter()
            for i in range(CALLS):
                run(i)
            times.append((time.perf_counter() - start) / CALLS)
        return statistics.median(times)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(CALLS):
            run(i)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(CALLS):
                run(i)
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / CALLS)
    return statistics.median(times)


def measured(options: argparse.Namespace, scheme: str, tokens: list[int], sizes: tuple[int, int, int, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    """The results of a scheme, which are printed, too."""
    experts, top_k, hidden, inner = sizes
    device = options.device
    act_scheme, _, weight_scheme = scheme.rpartition("_")
    spec = {"backend": device, "a_dtype": dtype, "act_scheme": act_scheme, "m_max": max(tokens)}

    def packed(n: int, k: int, **glu: Any) -> nibble.PackedExperts:
        floats = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k)) / k**0.5
        w = mxfp4(floats) if weight_scheme == "mxfp4" else nibble.quantize(floats, weight_scheme)
        return nibble.pack_experts((w for _ in range(experts)), **spec, **glu)  # equal ones take as long as others

    gate_up, down = packed(2 * inner, hidden, glu=True), packed(hidden, inner)
    results = []
    for routing in options.routing.split(","):
        for t in tokens:
            x = torch.randn(t, hidden, dtype=dtype).to(device)
            ids = [ids_of(routing, t, experts, top_k, seed) for seed in range(CALLS)]
            weights = torch.full((t, top_k), 1 / top_k).to(device)
            there = [i.to(device) for i in ids]
            out = torch.empty(t, hidden, dtype=dtype, device=device)
            hit = statistics.mean(len(i.unique()) for i in ids)
            mean = max(1, round(t * top_k / hit))
            seconds = timed(lambda i: nibble.moe(x, there[i], weights, gate_up, down, out=out, kernel=options.kernel), device, options.rounds)
            one = torch.randn(mean, hidden, dtype=dtype).to(device)
            two = torch.randn(mean, inner, dtype=dtype).to(device)
            each = timed(lambda i: gate_up[i % experts].linear(one, activation="silu"), device, options.rounds)
            each += timed(lambda i: down[i % experts].linear(two), device, options.rounds)
            read = hit * (gate_up[0].nbytes + down[0].nbytes)
            result = {
                "experts": experts, "top_k": top_k, "hidden": hidden, "intermediate": inner, "scheme": scheme, "a_dtype": options.dtype,
                "tokens": t, "routing": routing, "hit": hit, "us": seconds * 1e6, "gbytes_per_s": read / seconds * 1e-9,
                "tflops": 6e-12 * t * top_k * hidden * inner / seconds, "linear_us": hit * each * 1e6,
            }  # fmt: skip
            results.append(result)
            share = f" {result['gbytes_per_s'] / options.gbytes_per_s:5.0%}" if options.gbytes_per_s else ""
            print(f"{scheme} {routing:8} T={t:5} {hit:6.1f} experts hit {seconds * 1e6:9.1f} us {result['gbytes_per_s']:7.0f} GB/s{share}"
                  f" {result['tflops']:7.2f} TFLOPS, linear one by one {hit * each * 1e6:9.1f} us", flush=True)  # fmt: skip
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", help="experts, top_k, hidden, intermediate")
    parser.add_argument("--scheme", default="u4b8g128", help="of the weights, with that of the activations in front, or mxfp4; one or several (default u4b8g128)")
    parser.add_argument("--tokens", default="1,16,64,1024,4096")
    parser.add_argument("--routing", default="uniform", help="uniform, zipf, hot, empty: one or several")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--gbytes-per-s", type=float, default=0, help="the memory's read bandwidth, for shares of it")
    parser.add_argument("--kernel", default="", help="force both products' kernel")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args()
    experts, top_k, hidden, inner = map(int, options.sizes.split(","))
    dtype, device = getattr(torch, options.dtype), options.device
    tokens = [int(t) for t in options.tokens.split(",")]
    results = []
    for scheme in options.scheme.split(","):
        results += measured(options, scheme, tokens, (experts, top_k, hidden, inner), dtype)
    if options.json:
        with open(options.json, "w") as file:
            where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
            head = json.dumps({"kind": "experts", "device": where, "torch": torch.__version__, "nibble": nibble.__version__})
            lines = ",\n".join(f"  {json.dumps(result)}" for result in results)
            file.write(f'{head[:-1]}, "results": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
