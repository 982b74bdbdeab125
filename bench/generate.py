#!/usr/bin/env python3
"""Greedy generation by a decoder whose linear layers are nibble's, fused, against the same model in fp16: tokens per second, logits, and
where a GPU's time goes.

usage: bench/generate.py [--model llama-3-8b] [--schemes u4b8g128,s8r_s8c] [--head u8b128g128] [--batch 1,16] [--prompt 128,2048] [--tokens 128] [--layers 8]
                         [--dtype float16] [--rounds 5] [--unfused] [--compile] [--profile] [--no-logits] [--device cuda] [--json FILE [--add]]

The model is made from its configuration with random weights: speed does not depend on them. Its blocks are copies of one, in memory of their
own, so that one is quantized. A quantized model is compared with itself as float matrices (QuantLinear.dequantize), so that the difference
of logits is the kernels', and that of activations that are quantized. Times are medians of the rounds, each a prefill and its tokens. On a GPU decoding one token is a CUDA graph. --unfused measures models
before nibble.torch.fuse(), too. --add leaves the float model out and adds to the results in FILE, so that a shared machine is needed for
one model at a time. --compile gives all models to torch.compile before the graph is captured. --profile adds the shares of the
GPU's time, by kind of kernel and by kernel. Needs PyTorch and transformers, and the nibble package.
"""

import argparse
import copy
import inspect
import json
import re
import statistics
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, StaticCache

import nibble
import nibble.torch

LLAMA, QWEN3 = (LlamaConfig, LlamaForCausalLM), (Qwen3Config, Qwen3ForCausalLM)
# classes, hidden, intermediate, layers, heads, key-value heads, channels of a head, vocabulary
MODELS = {
    "tiny": (LLAMA, 256, 512, 2, 4, 2, 64, 1024),
    "llama-3.2-1b": (LLAMA, 2048, 8192, 16, 32, 8, 64, 128256),
    "llama-3.2-3b": (LLAMA, 3072, 8192, 28, 24, 8, 128, 128256),
    "llama-3-8b": (LLAMA, 4096, 14336, 32, 32, 8, 128, 128256),
    "qwen3-8b": (QWEN3, 4096, 12288, 36, 32, 8, 128, 151936),
}
# Weights of 4 bits, of 8 bits and int8 activations, FP8, weights of 4 bits and int8 activations.
SCHEMES = "u4b8g128,s8r_s8c,e4m3r_e4m3c,s8r_u4b8g128"
# What kernels are called, the first kind that matches. The matrix products of cuBLAS include those of nibble's dense tier.
KINDS = {"nibble": "nibble", "attention": "flash|fmha|attention|softmax|sdpa", "cuBLAS": "gemm|gemv|nvjet|cutlass|xmma|splitk", "others": ""}


def make(name, device, dtype, layers=None):
    """The model with the first of its blocks alone. layers: of the whole model, fewer than it has."""
    (configuration, cls), hidden, intermediate, all_layers, heads, kv_heads, head_dim, vocabulary = MODELS[name]
    layers = layers or all_layers
    config = configuration(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=head_dim, vocab_size=vocabulary, tie_word_embeddings=False, max_position_embeddings=1 << 15)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(config)
    finally:
        torch.set_default_dtype(before)
    config.num_hidden_layers = layers
    return model.eval()


def grow(model):
    """`model` with all of its blocks, which are copies of the first."""
    first = model.model.layers[0]
    for i in range(len(model.model.layers), model.config.num_hidden_layers):
        block = copy.deepcopy(first)
        block.load_state_dict(first.state_dict())  # weights in memory as nibble has it
        block.self_attn.layer_idx = i
        model.model.layers.append(block)
    return model


def as_matrices(model, quantized):
    """`model`, whose linear layers get the numbers of the quantized ones."""
    matrices = copy.deepcopy(model)
    for name, layer in quantized.named_modules():
        if isinstance(layer, nibble.torch.QuantLinear):
            matrices.get_submodule(name).weight.copy_(layer.dequantize(model.dtype))
    return matrices


class Decoder:
    """A model that decodes one token at a time, `batch` sequences side by side, in a graph where there is a GPU."""

    def __init__(self, model, batch, length, compiled=False):
        self.model, self.device = model, model.device
        torch.compiler.reset()
        self.decode = torch.compile(self.forward, fullgraph=True, dynamic=False) if compiled else self.forward
        parameters = inspect.signature(model.forward).parameters
        self.cache_is = "cache" if "cache" in parameters else "past_key_values"  # before transformers 5.24
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.logits, self.graph = None, None

    def forward(self, ids, position):
        positions = position.unsqueeze(0)
        return self.model(
            input_ids=ids, cache_position=position, position_ids=positions, use_cache=True, logits_to_keep=1,
            **{self.cache_is: self.cache}).logits[:, -1]

    def prefill(self, prompt):
        self.cache.reset()
        position = torch.arange(prompt.shape[1], device=self.device)
        self.ids.copy_(self.forward(prompt, position).argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])

    def step(self):
        """The next token of every sequence, in place."""
        self.logits = self.decode(self.ids, self.position)
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1

    def warm_up(self, prompt):
        self.prefill(prompt)
        for _ in range(2):  # plans are made, workspaces allocated, code is compiled
            self.step()

    def capture(self, prompt):
        """To be followed by a prefill: what is captured has run."""
        if self.device.type != "cuda":
            self.warm_up(prompt)
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.warm_up(prompt)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def advance(self):
        self.graph.replay() if self.graph is not None else self.step()

    def generate(self, prompt, tokens):
        """The tokens [B, tokens]; the seconds of the prefill, and those that they took after it."""
        wait(self.device)
        begin = time.perf_counter()
        self.prefill(prompt)
        out = [self.ids.clone()]
        wait(self.device)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            self.advance()
            out.append(self.ids.clone())
        wait(self.device)
        return torch.cat(out, 1), start - begin, time.perf_counter() - start


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def prompt_of(model, batch, length):
    generator = torch.Generator(device=model.device).manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), device=model.device, generator=generator)


def measure(model, batch, length, args):
    """Tokens per second while decoding, and the prefill's milliseconds; with --profile their kernels."""
    prompt = prompt_of(model, batch, length)
    decoder = Decoder(model, batch, length + args.tokens + 4, args.compile)
    decoder.capture(prompt)
    _, prefills, seconds = zip(*(decoder.generate(prompt, args.tokens) for _ in range(args.rounds)))
    result = {"tokens_per_second": batch * (args.tokens - 1) / statistics.median(seconds), "prefill_ms": statistics.median(prefills) * 1e3}
    if args.profile:
        steps = min(8, args.tokens)
        result["decode_profile"] = profile(lambda: [decoder.advance() for _ in range(steps)], steps)
        result["prefill_profile"] = profile(lambda: decoder.prefill(prompt), 1)
    return result


def profile(run, times):
    """Where the GPU's time goes: percent of the time from the first kernel's start to the last one's end. What two kernels run at the same
    time counts as the first one's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.time_range.end > e.time_range.start]
    if not events:
        raise SystemExit("--profile: PyTorch's profiler saw no kernel on the GPU")
    events.sort(key=lambda e: e.time_range.start)
    kernels, calls, begin, end = {}, {}, events[0].time_range.start, events[0].time_range.start
    for event in events:
        own = max(0, event.time_range.end - max(end, event.time_range.start))
        kernels[event.name] = kernels.get(event.name, 0) + own
        calls[event.name] = calls.get(event.name, 0) + 1
        end = max(end, event.time_range.end)
    kinds = {kind: 0 for kind in KINDS}
    for name, us in kernels.items():
        kinds[next(kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower()))] += us
    whole = end - begin
    kinds["gaps"] = whole - sum(kernels.values())
    longest = sorted(kernels, key=kernels.get, reverse=True)[:16]
    return {
        "us": whole / times, "kinds": {kind: 100 * us / whole for kind, us in kinds.items()},
        "kernels": [{"name": name[:160], "percent": 100 * kernels[name] / whole, "calls": calls[name] / times} for name in longest]}


def compare(model, matrices, length, tokens):
    """Logits over a prompt against those of float matrices: relative L2 distance; and the greedy tokens that agree."""
    both = model, matrices
    prompt = prompt_of(model, 2, length)
    here, there = (m(input_ids=prompt).logits.float() for m in both)
    distance = ((here - there).norm() / there.norm()).item()
    same = (here.argmax(-1) == there.argmax(-1)).float().mean().item()
    texts = []
    for m in both:
        decoder = Decoder(m, 2, length + tokens + 4)
        decoder.capture(prompt)
        texts.append(decoder.generate(prompt, tokens)[0])
    agree = (texts[0] == texts[1]).int().cumprod(1).sum(1).float().mean().item()
    return {"logits_relative_l2": distance, "same_argmax": same, "tokens_until_they_differ": agree, "tokens": tokens}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--model", choices=MODELS, default="llama-3-8b" if on_gpu else "llama-3.2-1b")
    parser.add_argument("--schemes", default=SCHEMES, help="of the quantized linear layers, separated by commas; none: the float model alone")
    parser.add_argument("--head", metavar="SCHEME", help="of lm_head, which is left in floats otherwise: u8b128g128; same: that of the layers")
    parser.add_argument("--batch", default="1,16", help="numbers of sequences")
    parser.add_argument("--prompt", default="128", help="their lengths before the first new token")
    parser.add_argument("--tokens", type=int, default=128, help="new ones of each sequence")
    parser.add_argument("--layers", type=int, help="blocks of the model, where memory does not hold all of them; the result says so")
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], help="float16 on a GPU, else float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--unfused", action="store_true", help="quantized models before they are fused, too")
    parser.add_argument("--compile", action="store_true", help="with torch.compile; takes a C compiler")
    parser.add_argument("--profile", action="store_true", help="shares of the GPU's time")
    parser.add_argument("--no-logits", action="store_true", help="without the comparison of logits, which takes the float model long on a CPU")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--json", help="where the results go, too")
    parser.add_argument("--add", action="store_true", help="to those of --json, without the float model")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.profile and device.type != "cuda":
        parser.error("--profile is of a GPU's kernels")
    if args.add and not args.json:
        parser.error("--add adds to the results in --json FILE")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: a median takes one")
    if args.tokens < 2:
        parser.error(f"--tokens {args.tokens}: a rate takes two")
    if args.layers is not None and not 1 <= args.layers <= MODELS[args.model][3]:
        parser.error(f"--layers {args.layers}: {args.model} has {MODELS[args.model][3]}")
    dtype = getattr(torch, args.dtype or ("float16" if device.type == "cuda" else "float32"))
    batches, lengths = ([int(x) for x in text.split(",")] for text in (args.batch, args.prompt))
    result = {
        "kind": "generation", "model": args.model, "layers": args.layers or MODELS[args.model][3], "all_layers": MODELS[args.model][3],
        "prompt": lengths[0] if len(lengths) == 1 else lengths, "tokens": args.tokens, "torch": torch.__version__, "nibble": nibble.__version__,
        "compiled": args.compile, "dtype": str(dtype)[6:], "runs": [],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{nibble.doctor()['cpu']}, {torch.get_num_threads()} threads"}
    if args.add:
        with open(args.json) as there:
            before = json.load(there)
        for key, value in result.items():
            if key not in ("prompt", "runs") and before.get(key) != value:
                raise SystemExit(f"--add: {key} is {value!r}, and {before.get(key)!r} in {args.json}")
        known = before["prompt"] if isinstance(before["prompt"], list) else [before["prompt"]]
        result = {**before, "prompt": sorted({*known, *lengths})}

    def report(what, model):
        for batch in batches:
            for length in lengths:
                run = measure(model, batch, length, args)
                result["runs"].append({"weights": what, "batch": batch, "prompt": length, **run})
                print(f"{what:>22}  batch {batch:3}  prompt {length:5}  {run['tokens_per_second']:9.1f} tokens/s  "
                      f"prefill {run['prefill_ms']:8.2f} ms", flush=True)
                for name in ("decode_profile", "prefill_profile"):
                    if name in run:
                        shares = ", ".join(f"{kind} {percent:.1f} %" for kind, percent in run[name]["kinds"].items())
                        print(f"{name[:-8]:>22}  {run[name]['us']:.0f} µs: {shares}", flush=True)
        save()

    def save():
        if args.json:
            with open(args.json, "w") as out:
                json.dump(result, out, indent=1)
                out.write("\n")

    with torch.inference_mode():
        model = make(args.model, device, dtype, args.layers)
        if not args.add:
            report(result["dtype"], grow(copy.deepcopy(model)))
        for scheme in filter(None, args.schemes.split(",")):
            quantized = copy.deepcopy(model)
            head = scheme if args.head == "same" else args.head
            nibble.torch.convert(quantized, scheme, head=head)
            matrices = None if args.no_logits else as_matrices(model, quantized)
            if args.unfused:
                report(f"{scheme} unfused", grow(copy.deepcopy(quantized)))
            left = nibble.torch.fuse(quantized).left
            if left:
                raise SystemExit(f"{scheme}: not fused: {left}")
            grow(quantized)
            if matrices is not None:
                difference = compare(quantized, grow(matrices), lengths[0], 32)
                del matrices
                result["runs"].append({"weights": scheme, **difference})
                print(f"{scheme:>22}  logits {difference['logits_relative_l2']:.2e} from those of the same numbers as {result['dtype']} matrices; "
                      f"the same token at {100 * difference['same_argmax']:.1f} % of positions", flush=True)
            report(f"{scheme}, head {head}" if head else scheme, quantized)
            del quantized


if __name__ == "__main__":
    sys.exit(main())
