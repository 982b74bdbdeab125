"""examples/decoder.cpp against a decoder in double precision, on small models that nibble quantizes; and against transformers.

The bound on the logits comes from the bounds of docs/accuracy.md on a layer: the reference runs again with random errors up to them added to the
results of its steps, and logits may be twice as far from the exact ones as those of the farthest such run.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import numpy as np
import pytest
from test_documents import write_safetensors

import nibble

DECODER = os.environ.get("NIBBLE_DECODER", "")
pytestmark = pytest.mark.skipif(not DECODER, reason="NIBBLE_DECODER does not name the example's program")

U = 2.0**-24
PROMPT, TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35], 12
LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=96, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=64,
             hidden_act="silu", tie_word_embeddings=False)  # fmt: skip
LLAMA3 = LLAMA | dict(
    rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
)
QWEN2 = LLAMA | dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True)
QWEN3 = LLAMA | dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=64)
MODELS = {
    "llama-float": (LLAMA, None, None),
    "llama3-awq": (LLAMA3, "u4zg64", "awq"),
    "qwen2-gptq": (QWEN2, "u4b8g32", "gptq"),
    "qwen3-compressed-tensors": (QWEN3, "u4b8g64", "compressed-tensors"),
}


def make_model(directory: pathlib.Path, config: dict) -> None:
    rng = np.random.default_rng(7)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    spread = 0.2 if config["tie_word_embeddings"] else 1  # of embeddings: a head like them repeats the last token
    tensors = {"model.embed_tokens.weight": spread * rng.standard_normal((config["vocab_size"], hidden)), "model.norm.weight": 1 + 0.1 * rng.standard_normal(hidden)}
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, n, k in [("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden), ("self_attn.o_proj", hidden, q),
                           ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner)]:  # fmt: skip
            tensors[f"{p}{name}.weight"] = rng.standard_normal((n, k)) / np.sqrt(k)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{p}{name}.weight"] = 1 + 0.1 * rng.standard_normal(hidden)
        if config["model_type"] == "qwen2":
            tensors |= {f"{p}self_attn.{name}_proj.bias": 0.5 * rng.standard_normal(n) for name, n in [("q", q), ("k", kv), ("v", kv)]}
        if config["model_type"] == "qwen3":
            tensors |= {f"{p}self_attn.{name}_norm.weight": 1 + 0.1 * rng.standard_normal(head) for name in "qk"}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = rng.standard_normal((config["vocab_size"], hidden)) / np.sqrt(hidden)
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", {name: t.astype(np.float32) for name, t in tensors.items()})
    (directory / "config.json").write_text(json.dumps(config))


def head_dim(config: dict) -> int:
    return config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])


class Reference:
    """A checkpoint's model in double precision."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        checkpoint = nibble.open(directory)
        self.tensors = {name: np.asarray(checkpoint.tensor(name), np.float64) for name in checkpoint.tensors if "norm" in name or "bias" in name}
        self.slopes: dict[str, np.ndarray] = {}  # (|q| + |z|)·s at most, of each output channel
        for module in checkpoint.modules:
            if not module.quantized:
                self.tensors[f"{module.name}.weight"] = np.asarray(checkpoint.tensor(f"{module.name}.weight"), np.float64)
                continue
            q = checkpoint.read(module.name)
            self.tensors[f"{module.name}.weight"] = nibble.pack(q).dequantize("f32").astype(np.float64)
            self.slopes[module.name] = 30 * np.asarray(q.scales, np.float64).max(axis=1)

    def logits(self, tokens: list[int], noise: np.random.Generator | None = None) -> np.ndarray:
        """[tokens, vocabulary]; with `noise` of a run whose steps have errors as large as f32 arithmetic may make them."""

        def off(y, error):
            return y if noise is None else y + error * noise.uniform(-1, 1, y.shape)

        def linear(name, x):
            w = self.tensors[f"{name}.weight"]
            y = x @ w.T + self.tensors.get(f"{name}.bias", 0)
            size, largest = np.abs(x), np.abs(x).max(axis=1, keepdims=True)
            dot = (7 * np.sqrt(w.shape[1]) + 3) * U * (size @ np.abs(w).T)
            fixed_point = 1.01 * 2 * U * largest * np.abs(w).sum(axis=1)
            zeros = 4 * U * size.sum(axis=1, keepdims=True) * self.slopes.get(name, 0)
            return off(y, dot + fixed_point + zeros + U * np.abs(y))

        def normalize(name, x):
            weight = self.tensors[f"{name}.weight"]
            runs = x.reshape(len(x), -1, len(weight))
            y = (runs / np.sqrt((runs**2).mean(axis=2, keepdims=True) + c["rms_norm_eps"]) * weight).reshape(x.shape)
            return off(y, 5 * U * np.abs(y))

        def rotate(x):
            heads = x.reshape(len(x), -1, dim)
            a, b = np.split(heads, 2, axis=2)
            y = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=2)
            return off(y, (2 * positions[:, None, None] + 4) * U * np.abs(heads).max(axis=2, keepdims=True))

        def attend(q, k, v):
            k, v = (np.repeat(t, c["num_attention_heads"] // c["num_key_value_heads"], axis=1) for t in (k, v))
            scores = np.einsum("mhd,thd->hmt", q, k) / np.sqrt(dim)
            sizes = np.einsum("mhd,thd->hmt", np.abs(q), np.abs(k)) / np.sqrt(dim)
            scores = np.where(positions[:, None] >= positions, off(scores, (7 * np.sqrt(dim) + 5) * U * sizes), -np.inf)
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            y, size = (np.einsum("hmt,thd->mhd", weights, t).reshape(len(x), -1) for t in (v, np.abs(v)))
            return off(y, (7 * np.sqrt(len(x)) + 10) * U * size)

        c = self.config
        dim, positions = head_dim(c), np.arange(len(tokens))
        angles = positions[:, None, None] * frequencies(c)
        x = self.tensors["model.embed_tokens.weight"][tokens]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            normed = normalize(p + "input_layernorm", x)
            q, k, v = (linear(f"{p}self_attn.{name}_proj", normed) for name in "qkv")
            if c["model_type"] == "qwen3":
                q, k = normalize(p + "self_attn.q_norm", q), normalize(p + "self_attn.k_norm", k)
            x = x + linear(p + "self_attn.o_proj", attend(rotate(q), rotate(k), v.reshape(len(x), -1, dim)))
            normed = normalize(p + "post_attention_layernorm", x)
            gate, up = linear(p + "mlp.gate_proj", normed), linear(p + "mlp.up_proj", normed)
            inner = gate / (1 + np.exp(-gate)) * up
            x = x + linear(p + "mlp.down_proj", off(inner, 10 * U * np.abs(inner)))
            x = off(x, 2 * U * np.abs(x))
        return linear("model.embed_tokens" if c["tie_word_embeddings"] else "lm_head", normalize("model.norm", x))

    def bounded_logits(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Those logits, and a bound on the error of each token's."""
        exact = self.logits(tokens)
        runs = [self.logits(tokens, np.random.default_rng(seed)) for seed in range(8)]
        return exact, 2 * np.max([np.abs(run - exact).max(axis=1) for run in runs], axis=0)


def frequencies(config: dict) -> np.ndarray:
    """Radians per position, as transformers computes them."""
    dim, rope = head_dim(config), config.get("rope_scaling")
    plain = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    if not rope:
        return plain
    wavelengths, context = 2 * np.pi / plain, rope["original_max_position_embeddings"]
    low, high, slow = rope["low_freq_factor"], rope["high_freq_factor"], plain / rope["factor"]
    smooth = (context / wavelengths - low) / (high - low)
    between = (1 - smooth) * slow + smooth * plain
    return np.where(wavelengths < context / high, plain, np.where(wavelengths > context / low, slow, between))


def decode(directory: pathlib.Path, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([DECODER, str(directory), *options], capture_output=True, text=True)


def run(directory: pathlib.Path, tokens: int, *options: str) -> tuple[list[int], np.ndarray]:
    """What follows PROMPT, and the logits of the last of these tokens."""
    file = directory / "logits.txt"
    done = decode(directory, "--prompt", ",".join(map(str, PROMPT)), "--tokens", str(tokens), "--logits", str(file), *options)
    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout.splitlines()[1]
    return [int(token) for token in done.stdout.splitlines()[0].split(",")], np.loadtxt(file)


@pytest.fixture(params=MODELS)
def model(request, tmp_path) -> pathlib.Path:
    config, scheme, format = MODELS[request.param]
    make_model(tmp_path / "float", config)
    if scheme is None:
        return tmp_path / "float"
    report = nibble.quantize_checkpoint(tmp_path / "float", tmp_path / "quantized", scheme, format=format)
    assert len(report.modules) == 7 * config["num_hidden_layers"]
    return tmp_path / "quantized"


def test_logits_and_tokens(model):
    ids, logits = run(model, TOKENS, "--threads", "2")
    assert len(ids) == TOKENS
    exact, bound = Reference(model).bounded_logits(PROMPT + ids[:-1])
    exact, bound = exact[len(PROMPT) - 1 :], bound[len(PROMPT) - 1 :]
    assert (bound < 0.01 * exact.std(axis=1)).all(), "a bound that finds nothing"
    first, second = np.sort(exact, axis=1)[:, [-1, -2]].T
    assert (first - second > 2 * bound).all(), "two tokens are as likely: take another seed"
    assert ids == exact.argmax(axis=1).tolist()
    assert np.abs(logits - exact[-1]).max() <= bound[-1]
    once, after_prompt = run(model, 1)
    assert once == ids[:1] and np.abs(after_prompt - exact[0]).max() <= bound[0]


def test_transformers(model, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = model
    if model.name == "quantized":
        directory = tmp_path / "dequantized"
        nibble.dequantize_checkpoint(model, directory, "f32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1].numpy()
    _, bound = Reference(model).bounded_logits(PROMPT)
    _, logits = run(model, 1)
    assert np.abs(logits - expected).max() <= 2 * bound[-1]  # either may be so far from the exact ones


@pytest.mark.parametrize("change, message", [
    ({"model_type": "gpt2"}, "model_type is \"gpt2\""),
    ({"hidden_size": 64}, "q_proj.weight is f32 [128,128], config.json asks for floats [64,64]"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0, expected 1 to"),
    ({"num_key_value_heads": 3}, "4 heads"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps is \"small\", expected a positive number"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "RoPE of type \"yarn\""),
    ({"max_position_embeddings": 4}, "more than the 4 tokens"),
    ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776"),
])  # fmt: skip
def test_refuses_other_models(tmp_path, change, message):
    make_model(tmp_path / "float", LLAMA)
    (tmp_path / "float" / "config.json").write_text(json.dumps(LLAMA | change))
    done = decode(tmp_path / "float", "--prompt", "1,2,3,4,5")
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_refuses_bad_arguments(tmp_path):
    make_model(tmp_path / "float", LLAMA)
    for options in [(), ("--prompt", ""), ("--prompt", "1,,2"), ("--prompt", "1,"), ("--prompt", "1", "--tokens", "0"), ("--prompt", "1", "--tokens"),
                    ("--prompt", "1", "--threads", "1,2"), ("--prompt", "1", "again"), ("--prompt", "1", "--what", "1")]:  # fmt: skip
        done = decode(tmp_path / "float", *options)
        assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True), options
    done = decode(tmp_path / "float", "--prompt", "1,96")
    assert (done.returncode, done.stderr) == (1, "token 96 of a vocabulary of 96\n")
    done = decode(tmp_path / "missing", "--prompt", "1")
    assert done.returncode == 1 and "missing" in done.stderr
