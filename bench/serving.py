#!/usr/bin/env python3
"""`vllm serve` with nibble and without: time to the first token, and tokens per second after it.

usage: bench/serving.py [--device cpu] [--model llama-3.2-1b] [--formats awq:u4zg128,gptq:u4b8g128,int-quantized:s8r_s8c] [--prompt 128] [--tokens 64]
                        [--streams 1,4] [--rounds 7] [--directory DIR] [--json FILE]

The checkpoints have random weights, and are kept in --directory. Of each there are two servers side by side, which are asked in turn, each while
the other waits: one with nibble and one with NIBBLE_VLLM=0. Medians of the rounds. Needs vLLM for the device, and nibble in the same environment.

On the CPU all of them use every core, and Intel's OpenMP library where it is installed beside vLLM, as vLLM's manual says; of weights of 4 bits there are
another two servers with VLLM_CPU_INT4_W4A8=0, without which both quantize activations where there is AMX.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import importlib.metadata
import json
import os
import pathlib
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import generate
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import nibble

FORMATS = "awq:u4zg128,gptq:u4b8g128,int-quantized:s8r_s8c"
CORES = sorted(os.sched_getaffinity(0))


def make(name, device, directory, format, scheme):
    """The checkpoint, and before it the float model that it is made of."""
    floats, out = directory / name, directory / f"{name}-{format}-{scheme}"
    if not (floats / "tokenizer.json").exists():
        model = generate.grow(generate.make(name, torch.device(device), torch.bfloat16))
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.save_pretrained(floats)
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(model.config.vocab_size)}, unk_token="t0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(floats)
    if not out.exists():
        nibble.quantize_checkpoint(floats, out, scheme, format=format)
    return out


class Server:
    def __init__(self, path, log, args, **variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log, self.vocabulary = log, json.loads((path / "config.json").read_text())["vocab_size"]
        most = max(args.streams)
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--host", "127.0.0.1", "--port", self.port, "--served-model-name", "model", "--no-enable-prefix-caching",
            "--max-num-seqs", most, "--max-model-len", args.prompt + args.tokens + 16, "--kv-cache-memory-bytes", 1 << (29 if args.device == "cpu" else 32)]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
        if args.device == "cpu":
            env["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, CORES))
            intel = pathlib.Path(sys.prefix, "lib/libiomp5.so")
            if intel.exists():
                env.setdefault("LD_PRELOAD", str(intel))
        else:
            command += ["--gpu-memory-utilization", 0.4]  # two servers share it
        self.process = subprocess.Popen([*map(str, command)], env=env, stdout=log.open("w"), stderr=subprocess.STDOUT)

    def wait(self):
        while True:
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            if self.process.poll() is not None:
                raise SystemExit(f"serving.py: vllm serve ended:\n{self.log.read_text()[-4000:]}")
            time.sleep(1)

    def complete(self, prompt, tokens):
        """When it was asked, and when each of its tokens came."""
        body = {
            "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        begin, times = time.perf_counter(), []
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                known = json.loads(line[6:])["usage"]["completion_tokens"]
                times += [time.perf_counter()] * (known - len(times))
        if len(times) != tokens:
            raise SystemExit(f"serving.py: {len(times)} tokens came instead of {tokens}: {self.log.read_text()[-4000:]}")
        return begin, times

    def measure(self, streams, prompt, tokens, seed):
        """Milliseconds to the first token, and tokens per second from when every stream has one until the first stream ends."""
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(self.vocabulary) for _ in range(prompt)] for _ in range(streams)]
        with concurrent.futures.ThreadPoolExecutor(streams) as pool:
            done = list(pool.map(lambda ids: self.complete(ids, tokens), prompts))
        start, end = max(times[0] for _, times in done), min(times[-1] for _, times in done)
        if start >= end:
            raise SystemExit(f"serving.py: a request had all of its {tokens} tokens before another had one; write more --tokens, or fewer --streams")
        decoded = sum(start < t <= end for _, times in done for t in times)
        return statistics.median((times[0] - begin) * 1e3 for begin, times in done), decoded / (end - start)


def by_turns(servers, streams, args):
    """Of each server the medians of the rounds."""
    rounds = {what: [] for what in servers}
    for turn in range(-1, args.rounds):  # the first one does not count
        for what, server in servers.items():
            measured = server.measure(streams, args.prompt, args.tokens, turn)
            if turn >= 0:
                rounds[what].append(measured)
    medians = {what: [statistics.median(values) for values in zip(*pairs)] for what, pairs in rounds.items()}
    return {what: {"first_token_ms": round(first, 1), "tokens_per_second": round(rate, 2)} for what, (first, rate) in medians.items()}


def where(device):
    if device == "cuda":
        return {"gpu": torch.cuda.get_device_name()}
    return {"cpu": nibble.doctor()["cpu"], "isa": nibble.doctor()["isa"], "threads": len(CORES)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=generate.MODELS, default="llama-3.2-1b")
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4], help="requests at the same time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=pathlib.Path, help="of checkpoints and logs; else one that is removed")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    args = parser.parse_args()
    package = "vllm-cpu" if args.device == "cpu" else "vllm"
    result = {
        "kind": "serving", "model": args.model, "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds, "vllm": importlib.metadata.version(package),
        "torch": torch.__version__, "nibble": nibble.__version__, **where(args.device), "runs": []}
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or pathlib.Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        for format, scheme in (text.split(":") for text in args.formats.split(",")):
            path = make(args.model, args.device, directory, format, scheme)
            floats = {" W4A16": {"VLLM_CPU_INT4_W4A8": "0"}} if args.device == "cpu" and scheme.startswith("u4") else {}
            for kind, variables in {"": {}, **floats}.items():
                servers = {}
                try:
                    for what, switch in (("nibble", "1"), ("vLLM", "0")):
                        servers[what] = Server(path, directory / f"{path.name}-{what}{kind}.log", args, NIBBLE_VLLM=switch, **variables)
                    for what, server in servers.items():
                        server.wait()
                        if bool(re.search("(Using|Selected) Nibble", server.log.read_text())) != (what == "nibble"):
                            raise SystemExit(f"serving.py: {what}: another kernel was taken: {server.log}")
                    for streams in args.streams:
                        run = {"format": format, "scheme": scheme + kind, "streams": streams, **by_turns(servers, streams, args)}
                        for what in servers:
                            print(f"{format:>18} {scheme + kind:<15} {streams:2} streams  {what:<6} {run[what]}", flush=True)
                        result["runs"].append(run)
                finally:
                    for server in servers.values():
                        server.process.terminate()
                    for server in servers.values():
                        server.process.wait()
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
