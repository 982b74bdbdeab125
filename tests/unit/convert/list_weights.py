#!/usr/bin/env python3
"""Writes model_weights.json: which weights of the models of transformers are linear layers.

Every architecture is made on the meta device with its default config. Of layers that are alike one stands for all. What is no linear
layer is listed of every architecture, linear layers of those in WHOLE and where a name could be taken for something else. Needs
transformers and PyTorch; model_weights.json says which versions it was made with.
"""
import json
import pathlib
import re
import signal
import sys

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

WHOLE = ("bart bert bloom clip clvp deepseek_v3 distilbert falcon gemma3_text gpt2 gpt_neox gpt_oss gptj llama mamba mistral mixtral "
         "modernbert mpt olmoe opt phi3 qwen2 qwen2_moe qwen3_moe qwen3_vl roberta siglip t5 vit whisper").split()
MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM")
AMBIGUOUS = re.compile(r"emb|token|table|gate|router|bias", re.I)


def classes():
    """model_type: the class with a head, where there is one."""
    found = {}
    for mapping in [f"MODEL_FOR_{m}_MAPPING_NAMES" for m in MAPPINGS] + ["MODEL_MAPPING_NAMES"]:
        for model_type, name in getattr(modeling_auto, mapping).items():
            found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return sorted(found.items())


def integers(config, key=""):
    """(key, value) of every integer of a config."""
    if isinstance(config, dict):
        for name, value in config.items():
            yield from integers(value, name)
    elif isinstance(config, list):
        for value in config:
            yield from integers(value, key)
    elif isinstance(config, int) and not isinstance(config, bool):
        yield key, config


def kind_of(model, module, name):
    owners = [model.get_submodule(name.rsplit(".", i)[0]) for i in range(min(3, name.count(".") + 1))]
    if any(re.search("Router|TopKGating", type(owner).__name__) for owner in owners):
        return "router"
    if module is model.get_output_embeddings():
        return "head"
    if isinstance(module, nn.Linear) or type(module).__name__ == "QuantLinear":
        return "linear"
    return "transposed" if type(module).__name__ == "Conv1D" else "other"


def describe(model_type, class_name):
    config = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type])()
    with torch.device("meta"):
        model = getattr(transformers, class_name)._from_config(config)
    modules, rows = dict(model.named_modules()), {}
    for tensor, weight in model.named_parameters(remove_duplicate=False):
        name = tensor.removesuffix(".weight")
        if name == tensor or weight.dim() != 2:
            continue
        bias = getattr(modules[name], "bias", None)
        kind = kind_of(model, modules[name], name)
        row = [list(weight.shape), bias.numel() if isinstance(bias, torch.Tensor) else 0, kind]
        if kind != "linear" or model_type in WHOLE or AMBIGUOUS.search(".".join(name.split(".")[-2:])):
            rows.setdefault(json.dumps([re.sub(r"\d+", "#", name), row]), [name, *row])
    wanted = {n for row in rows.values() for n in row[1]}
    sizes = {}
    for key, value in integers(json.loads(config.to_json_string(use_diff=False))):
        if value in wanted:
            sizes.setdefault(key, set()).add(value)
    return {"config": {key: sorted(values) for key, values in sorted(sizes.items())}, "weights": list(rows.values())}


def main():
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    lines, left_out = [], []
    for model_type, class_name in classes():
        signal.alarm(120)
        try:
            model = describe(model_type, class_name)
        except Exception as error:  # a default config that makes no model, or needs further packages
            left_out.append(f"{model_type} ({type(error).__name__})")
            continue
        finally:
            signal.alarm(0)
        if model["weights"]:
            lines.append(f'"{model_type}": {json.dumps(model, separators=(",", ":"))}')
    text = f'{{"transformers": "{transformers.__version__}", "torch": "{torch.__version__.split("+")[0]}",\n"models": {{\n'
    pathlib.Path(__file__).with_name("model_weights.json").write_text(text + ",\n".join(lines) + "\n}}\n")
    print(f"{len(lines)} models; left out: {', '.join(left_out)}", file=sys.stderr)


if __name__ == "__main__":
    main()
