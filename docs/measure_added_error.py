#!/usr/bin/env python3
"""Measures what quantizing activations adds to the error of layers, way by way: for Gaussian activations, for some with outlier
channels, and for those of a trained model reading a text. Writes JSON.

usage: docs/measure_added_error.py NIBBLE MINILM_DIR TEXT OUT.json [--name TEXT]

The trained activations are real: MiniLM is run here, in float, on the first word pieces of TEXT, and what goes into each of its
linear layers is kept (numpy does the arithmetic). MINILM_DIR is what tests/fetch_minilm.py fetches.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import struct
import subprocess
import tempfile

import numpy

OUTLIERS = 100
SEQUENCES, LENGTH = 2, 128


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + size])
    return {name: numpy.frombuffer(data, "<f4", offset=8 + size + t["data_offsets"][0],
                                   count=(t["data_offsets"][1] - t["data_offsets"][0]) // 4).reshape(t["shape"])
            for name, t in header.items() if name != "__metadata__" and t["dtype"] == "F32"}


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [offset, offset + t.nbytes]}
        offset += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(t.astype("<f4").tobytes() for t in tensors.values()))


def word_pieces(text, vocabulary):
    """Greedy WordPiece of lower-cased words and punctuation, as BERT's uncased models read plain English."""
    index = {piece: i for i, piece in enumerate(vocabulary)}
    ids = []
    for word in re.findall(r"[a-z0-9]+|[^\sa-z0-9]", text.lower()):
        begin, pieces = 0, []
        while begin < len(word):
            ends = (end for end in range(len(word), begin, -1) if ("##" if begin else "") + word[begin:end] in index)
            end = next(ends, None)
            if end is None:
                pieces = [index["[UNK]"]]
                break
            pieces.append(index[("##" if begin else "") + word[begin:end]])
            begin = end
        ids += pieces
    return ids


def inputs_of_layers(directory, text):
    """MODULE.input of every linear layer of BERT, all tokens of a few sequences below each other."""
    config = json.loads((directory / "config.json").read_text())
    w = read_safetensors(directory / "model.safetensors")
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]
    vocabulary = (directory / "vocab.txt").read_text().splitlines()
    body = LENGTH - 2
    ids = word_pieces(text, vocabulary)[:SEQUENCES * body]
    if len(ids) < SEQUENCES * body:
        raise SystemExit(f"the text has {len(ids)} word pieces, {SEQUENCES * body} are needed")
    begin, end = vocabulary.index("[CLS]"), vocabulary.index("[SEP]")
    ids = numpy.array([[begin, *ids[i * body:(i + 1) * body], end] for i in range(SEQUENCES)])
    seen = {}

    def linear(name, x):
        seen[f"{name}.input"] = x.reshape(-1, x.shape[-1]).astype(numpy.float32)
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        return x / numpy.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x):
        erf = numpy.vectorize(math.erf, otypes=[float])
        return 0.5 * x * (1 + erf(x / numpy.sqrt(2)))

    def split(x):
        return x.reshape(SEQUENCES, LENGTH, heads, -1).transpose(0, 2, 1, 3)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:LENGTH]
    x = norm("embeddings.LayerNorm", (x + w["embeddings.token_type_embeddings.weight"][0]).astype(numpy.float64))
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (split(linear(f"{layer}.attention.self.{part}", x)) for part in ("query", "key", "value"))
        scores = q @ k.transpose(0, 1, 3, 2) / numpy.sqrt(q.shape[-1])
        scores = numpy.exp(scores - scores.max(-1, keepdims=True))
        context = (scores / scores.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", context))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", gelu(linear(f"{layer}.intermediate.dense", x))))
    linear("pooler.dense", x[:, 0])
    return seen


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE).stdout


def summary(nibble, model, label, *options):
    """Of each way: the median and the worst layer's relative L2 error."""
    inspected = json.loads(run(nibble, "inspect", model, "--act-scheme", "all", "--json", *options))
    by_way = {}
    for module in inspected["modules"]:
        for error in module.get("added_error", []):
            by_way.setdefault(error["act_scheme"], []).append(error["relative_l2"])
    return {"activations": label,
            "ways": [{"way": way, "layers": len(all), "median": statistics.median(all), "worst": max(all)} for way, all in by_way.items()]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nibble")
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--name", help="what to call the model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        quantized, calibration = pathlib.Path(temporary) / "quantized", pathlib.Path(temporary) / "acts.safetensors"
        run(args.nibble, "quantize", args.model, quantized, "--format", "compressed-tensors", "--scheme", "u4zg128")
        write_safetensors(calibration, inputs_of_layers(args.model, args.text.read_text()))
        name = args.name or args.model.name
        result = {
            "schema": 1, "model": name, "text": args.text.name, "tokens": SEQUENCES * LENGTH, "weights": "u4zg128",
            "series": [summary(args.nibble, quantized, "Gaussian"),
                       summary(args.nibble, quantized, f"Gaussian, every 256th channel ×{OUTLIERS}", "--outliers", OUTLIERS),
                       summary(args.nibble, quantized, f"{name} reading a text", "--calibration", calibration)],
        }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
