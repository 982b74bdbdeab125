#!/usr/bin/env python3
"""Greedy generation by a Llama whose linear layers are nibble's, against the same model in fp16: tokens per second, and logits.

usage: bench/generate.py [--model llama-3.2-1b] [--schemes u4b8g128,u8b128g128] [--batch 1,16] [--prompt 128] [--tokens 128]
                         [--device cuda] [--json FILE]

The model is made from its configuration with random weights: speed does not depend on them. A quantized model is compared with itself
as float matrices (QuantLinear.dequantize), so that the difference of logits is the kernels' and not the quantization's. Decoding one
token is a CUDA graph. Needs PyTorch and transformers, and the nibble package.
"""

import argparse
import copy
import json
import sys
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import nibble.torch

# hidden, intermediate, layers, heads, key-value heads, vocabulary
MODELS = {
    "tiny": (256, 512, 2, 4, 2, 1024),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
}


def make(name, device, dtype):
    hidden, intermediate, layers, heads, kv_heads, vocabulary = MODELS[name]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=False, max_position_embeddings=4096)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def as_matrices(model, quantized):
    """`model`, whose linear layers get the numbers of the quantized ones."""
    matrices = copy.deepcopy(model)
    for name, layer in quantized.named_modules():
        if isinstance(layer, nibble.torch.QuantLinear):
            matrices.get_submodule(name).weight.copy_(layer.dequantize(model.dtype))
    return matrices


class Decoder:
    """A model that decodes one token at a time, `batch` sequences side by side, in a graph where there is a GPU."""

    def __init__(self, model, batch, length):
        self.model, self.device = model, model.device
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.ids = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.logits, self.graph = None, None

    def forward(self, ids, position):
        positions = position.unsqueeze(0)
        return self.model(
            input_ids=ids, past_key_values=self.cache, cache_position=position, position_ids=positions, use_cache=True,
            logits_to_keep=1).logits[:, -1]

    def prefill(self, prompt):
        self.cache.reset()
        position = torch.arange(prompt.shape[1], device=self.device)
        self.ids.copy_(self.forward(prompt, position).argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])

    def step(self):
        """The next token of every sequence, in place."""
        self.logits = self.forward(self.ids, self.position)
        self.ids.copy_(self.logits.argmax(-1, keepdim=True))
        self.position += 1

    def capture(self, prompt):
        """To be followed by a prefill: what is captured has run."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.prefill(prompt)
            for _ in range(2):  # plans are made, workspaces allocated
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()

    def advance(self):
        self.graph.replay() if self.graph is not None else self.step()

    def generate(self, prompt, tokens):
        """The tokens [B, tokens], and the seconds they took after the prefill."""
        self.prefill(prompt)
        out = [self.ids.clone()]
        wait(self.device)
        start = time.perf_counter()
        for _ in range(tokens - 1):
            self.advance()
            out.append(self.ids.clone())
        wait(self.device)
        return torch.cat(out, 1), time.perf_counter() - start


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(model, batch, prompt_length, tokens):
    """Tokens per second while decoding, the median of three; and the prefill's milliseconds."""
    prompt = torch.randint(model.config.vocab_size, (batch, prompt_length), device=model.device, generator=generator(model.device))
    decoder = Decoder(model, batch, prompt_length + tokens + 4)
    decoder.capture(prompt)
    seconds = sorted(decoder.generate(prompt, tokens)[1] for _ in range(3))[1]
    prefills = []
    for _ in range(5):
        wait(model.device)
        start = time.perf_counter()
        decoder.prefill(prompt)
        wait(model.device)
        prefills.append(time.perf_counter() - start)
    return batch * (tokens - 1) / seconds, sorted(prefills)[2] * 1e3


def generator(device):
    return torch.Generator(device=device).manual_seed(1)


def compare(model, quantized, prompt_length, tokens):
    """Logits over a prompt against those of float matrices: relative L2 distance; and the greedy tokens that agree."""
    both = quantized, as_matrices(model, quantized)
    prompt = torch.randint(model.config.vocab_size, (2, prompt_length), device=model.device, generator=generator(model.device))
    here, there = (m(input_ids=prompt).logits.float() for m in both)
    distance = ((here - there).norm() / there.norm()).item()
    same = (here.argmax(-1) == there.argmax(-1)).float().mean().item()
    texts = []
    for m in both:
        decoder = Decoder(m, 2, prompt_length + tokens + 4)
        decoder.capture(prompt)
        texts.append(decoder.generate(prompt, tokens)[0])
    agree = (texts[0] == texts[1]).int().cumprod(1).sum(1).float().mean().item()
    return {"logits_relative_l2": distance, "same_argmax": same, "tokens_until_they_differ": agree, "tokens": tokens}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b")
    parser.add_argument("--schemes", default="u4b8g128,u8b128g128", help="of the quantized linear layers, separated by commas")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="where the results go, too")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    batches = [int(b) for b in args.batch.split(",")]
    result = {
        "kind": "generation", "model": args.model, "prompt": args.prompt, "tokens": args.tokens, "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "dtype": str(dtype)[6:], "runs": []}

    def measure(what, model):
        for batch in batches:
            per_second, prefill_ms = rate(model, batch, args.prompt, args.tokens)
            result["runs"].append({"weights": what, "batch": batch, "tokens_per_second": per_second, "prefill_ms": prefill_ms})
            print(f"{what:>12}  batch {batch:3}  {per_second:9.1f} tokens/s  prefill {prefill_ms:8.2f} ms", flush=True)

    with torch.inference_mode():
        model = make(args.model, device, dtype)
        measure(result["dtype"], model)
        for scheme in args.schemes.split(","):
            quantized = copy.deepcopy(model)
            nibble.torch.convert(quantized, scheme)
            difference = compare(model, quantized, args.prompt, 32)
            result["runs"].append({"weights": scheme, **difference})
            print(f"{scheme:>12}  logits {difference['logits_relative_l2']:.2e} from those of the same numbers as {result['dtype']} matrices; "
                  f"the same token at {100 * difference['same_argmax']:.1f} % of positions", flush=True)
            measure(scheme, quantized)
            del quantized
    if args.json:
        with open(args.json, "w") as out:
            json.dump(result, out, indent=1)
            out.write("\n")


if __name__ == "__main__":
    sys.exit(main())
