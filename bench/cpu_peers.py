#!/usr/bin/env python3
"""nibble and other libraries side by side on this CPU, into one JSON that docs/render.py shows as a table.

usage: bench/cpu_peers.py [--json FILE] [--modes SCHEME,...] [-M 1,4,...] [--shapes FILE] [--rounds 7] [--seconds 0.05] [--threads N] [--isa avx2|avx512bf16]

Compared are those of onnxruntime, openvino, torch and XNNPACK that can be imported: pip install onnxruntime onnx openvino torch executorch
torchao. Each library runs in a process of its own, which waits while another is measured; in each round the libraries take turns in random
order. All multiply by the same codes and scales, of which each has 256 MiB of copies, or 64 of them, that take turns. Every result is
compared with the product of dequantized weights; a library whose relative error is over 3 % is left out, with that reason, and so is one
without such a product. With --isa they keep to these instructions, as those of an older CPU; onnxruntime and XNNPACK, which cannot be told,
are left out.
"""

import argparse
import datetime
import importlib.metadata
import json
import logging
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time
import warnings

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
# All copies of a weight that a library has.
COLD_BYTES, MOST_COPIES = 256 << 20, 64
MOST_ERROR = 0.03
# How libraries are told to keep to older instructions, where they can be.
LIMITS = {"avx2": {"NIBBLE_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
          "avx512bf16": {"NIBBLE_ISA": "avx512bf16", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "ATEN_CPU_CAPABILITY": "avx512"}}  # fmt: skip
LIMITED = {"nibble", "openvino", "torch"}
# What multiplies the weights, the type of the activations, and how they are quantized.
MODES = {
    "u4b8g32": ("u4b8g32", "f32", ""),
    "u4b8g128": ("u4b8g128", "f32", ""),
    "u4zg128": ("u4zg128", "f32", ""),
    "u4b8g128 × bf16": ("u4b8g128", "bf16", ""),
    "s8g32_u4b8g32": ("u4b8g32", "f32", "s8g32"),
    "s8g128_u4b8g128": ("u4b8g128", "f32", "s8g128"),
    "s8g128_u4zg128": ("u4zg128", "f32", "s8g128"),
    "s8r_s8c": ("s8c", "f32", "s8r"),
}


class LeftOut(Exception):
    """This library has no such product."""


class Nibble:
    def __init__(self, threads):
        os.environ["NIBBLE_NUM_THREADS"] = str(threads)
        import nibble

        self.nibble = nibble

    def version(self):
        return self.nibble.__version__

    def layers(self, mode, q, copies):
        scheme, dtype, act = mode
        made = self.nibble.quantize(q["w"], scheme)
        weights = [self.nibble.pack(made, a_dtype=dtype, act_scheme=act) for _ in range(copies)]

        def bind(x):
            if dtype == "bf16":
                import torch

                x = torch.from_numpy(x).to(torch.bfloat16)
            out = weights[0].linear(x)
            return [lambda w=w: w.linear(x, out=out) for w in weights], lambda y: np.asarray(y.float() if dtype == "bf16" else y)

        return bind


class OnnxRuntime:
    """MatMulNBits, with f32 sums of floats or (accuracy_level 4) of int8 activations in blocks; DynamicQuantizeMatMul, a scale per tensor."""

    def __init__(self, threads):
        import onnx
        import onnxruntime

        self.onnx, self.ort, self.threads = onnx, onnxruntime, threads
        onnxruntime.set_global_thread_pool_sizes(threads, 1)

    def version(self):
        return self.ort.__version__

    def layers(self, mode, q, copies):
        scheme, dtype, act = mode
        if dtype != "f32":
            raise LeftOut("its products take f32")
        n, k = q["codes"].shape
        helper, data = self.onnx.helper, self.onnx.TensorProto
        arrays = {}
        if scheme == "s8c":
            arrays["b"] = np.ascontiguousarray(q["codes"].T)
            arrays["s"] = q["scales"].reshape(-1)
            node = helper.make_node("DynamicQuantizeMatMul", ["a", "b", "s"], ["d"], domain="com.microsoft")
        else:
            group = k // q["scales"].shape[1]
            low, high = q["codes"][:, 0::2], q["codes"][:, 1::2]
            arrays["b"] = (low | high << 4).reshape(n, k // group, group // 2)
            arrays["s"] = q["scales"].reshape(-1)
            inputs = ["a", "b", "s"]
            if q["zeros"] is not None:
                arrays["z"] = (q["zeros"][:, 0::2] | q["zeros"][:, 1::2] << 4).reshape(-1)
                inputs.append("z")
            node = helper.make_node("MatMulNBits", inputs, ["d"], domain="com.microsoft", K=k, N=n, bits=4, block_size=group,
                                    accuracy_level=4 if act else 1)  # fmt: skip
        graph = helper.make_graph([node], "layer", [helper.make_tensor_value_info("a", data.FLOAT, [None, k])],
                                  [helper.make_tensor_value_info("d", data.FLOAT, [None, n])],
                                  [self.onnx.numpy_helper.from_array(a, name) for name, a in arrays.items()])  # fmt: skip
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10)
        blob = model.SerializeToString()
        options = self.ort.SessionOptions()
        options.use_per_session_threads = False
        options.log_severity_level = 3
        sessions = [self.ort.InferenceSession(blob, options, providers=["CPUExecutionProvider"]) for _ in range(copies)]

        def bind(x):
            a = self.ort.OrtValue.ortvalue_from_numpy(x)
            d = self.ort.OrtValue.ortvalue_from_numpy(np.empty((len(x), n), np.float32))

            def call(session):
                binding = session.io_binding()
                binding.bind_ortvalue_input("a", a)
                binding.bind_ortvalue_output("d", d)

                def run():
                    session.run_with_iobinding(binding)
                    return d

                return run

            return [call(session) for session in sessions], lambda y: y.numpy()

        return bind


class OpenVino:
    """A matrix product by compressed weights; DYNAMIC_QUANTIZATION_GROUP_SIZE makes int8 of its activations, in groups or per token."""

    def __init__(self, threads):
        import openvino

        self.ov, self.threads = openvino, threads

    def version(self):
        return self.ov.__version__.split("-")[0]

    def layers(self, mode, q, copies):
        scheme, dtype, act = mode
        ops, types = self.ov.opset13, self.ov.Type
        n, k = q["codes"].shape
        a = self.ov.op.Parameter(types.f32, self.ov.PartialShape([-1, k]))
        groups = q["scales"].shape[1]
        if scheme == "s8c":
            codes = ops.constant(q["codes"], types.i8)
            w = ops.multiply(ops.convert(codes, "f32"), ops.constant(q["scales"]))
        else:
            shape = [n, groups, k // groups]
            codes = self.ov.op.Constant(types.u4, self.ov.Shape(shape), q["codes"].reshape(-1).tolist())
            zeros = q["zeros"] if q["zeros"] is not None else np.full((n, groups), 8, np.uint8)
            zeros = self.ov.op.Constant(types.u4, self.ov.Shape([n, groups, 1]), zeros.reshape(-1).tolist())
            scales = ops.constant(q["scales"].reshape(n, groups, 1).astype(np.float16))
            w = ops.multiply(ops.subtract(ops.convert(codes, "f16"), ops.convert(zeros, "f16")), scales)
            w = ops.convert(ops.reshape(w, ops.constant(np.array([n, k], np.int64)), False), "f32")
        model = self.ov.Model([ops.matmul(a, w, False, True)], [a], "layer")
        group = {"": 0, "s8r": k}.get(act, k // groups)
        config = {"INFERENCE_NUM_THREADS": self.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False,
                  "INFERENCE_PRECISION_HINT": types.bf16 if dtype == "bf16" else types.f32, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}  # fmt: skip
        core = self.ov.Core()
        requests = [core.compile_model(model, "CPU", config).create_infer_request() for _ in range(copies)]

        def bind(x):
            tensor = self.ov.Tensor(x, shared_memory=True)

            def call(request):
                request.set_input_tensor(tensor)

                def run():
                    request.infer()
                    return request

                return run

            return [call(request) for request in requests], lambda y: y.get_output_tensor().data

        return bind


class Torch:
    """_weight_int4pack_mm_for_cpu, of bf16; quantized::linear_dynamic of oneDNN, a scale per tensor of activations."""

    def __init__(self, threads):
        import torch

        self.torch = torch
        warnings.simplefilter("ignore")  # of deprecated quantized tensors
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def version(self):
        return self.torch.__version__.split("+")[0]

    def layers(self, mode, q, copies):
        torch = self.torch
        scheme, dtype, act = mode
        if scheme == "u4b8g128" and dtype == "bf16":
            group = q["codes"].shape[1] // q["scales"].shape[1]
            scales = torch.from_numpy(q["scales"]).to(torch.bfloat16)
            parameters = torch.stack([scales, torch.zeros_like(scales)], dim=2).transpose(0, 1).contiguous()
            codes = torch.from_numpy(q["codes"].astype(np.int32))
            weights = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(copies)]

            def bind(x):
                x = torch.from_numpy(x).to(torch.bfloat16)
                return ([lambda w=w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, group, parameters) for w in weights],
                        lambda y: y.float().numpy())  # fmt: skip

            return bind
        if scheme == "s8c":
            torch.backends.quantized.engine = "onednn"
            w = torch._make_per_channel_quantized_tensor(torch.from_numpy(q["codes"]), torch.from_numpy(q["scales"].reshape(-1)).double(),
                                                         torch.zeros(len(q["codes"]), dtype=torch.long), 0)  # fmt: skip
            weights = [torch.ops.quantized.linear_prepack(w, None) for _ in range(copies)]

            def bind(x):
                x = torch.from_numpy(x)
                return [lambda w=w: torch.ops.quantized.linear_dynamic(x, w, False) for w in weights], lambda y: y.numpy()

            return bind
        raise LeftOut("it has no such product")


class Xnnpack:
    """Linear layers by XNNPACK, through ExecuTorch: weights in blocks or per channel, activations int8 per token with a zero point. Only for so
    many tokens that weights need not be cold."""

    LEAST_TOKENS = 64

    def __init__(self, threads):
        logging.disable()
        warnings.simplefilter("ignore")
        import torch
        from executorch.extension.pybindings import portable_lib
        from executorch.runtime import Runtime

        torch.set_grad_enabled(False)
        portable_lib._unsafe_reset_threadpool(threads)
        self.torch, self.runtime = torch, Runtime.get()

    def version(self):
        return "of executorch " + importlib.metadata.version("executorch")

    def layers(self, mode, q, copies):
        torch = self.torch
        scheme, dtype, act = mode
        if not act or q["zeros"] is not None:
            raise LeftOut("it has no such product")
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup

        n, k = q["codes"].shape
        groups = q["scales"].shape[1]
        granularity = PerAxis(0) if groups == 1 else PerGroup(k // groups)
        config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int8 if groups == 1 else torch.int4, weight_granularity=granularity)

        layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False)).eval()
        layer[0].weight = torch.nn.Parameter(torch.from_numpy(q["dense"]), requires_grad=False)
        quantize_(layer, config)
        layer[0].weight.qdata.copy_(torch.from_numpy(q["codes"].astype(np.int8) - (0 if groups == 1 else 8)))
        layer[0].weight.scale.copy_(torch.from_numpy(q["scales"]))
        any_m = ({0: torch.export.Dim("m", min=1, max=4096)},)
        exported = torch.export.export(layer, (torch.zeros(4, k),), dynamic_shapes=any_m)
        program = self.runtime.load_program(to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch().buffer)
        method = program.load_method("forward")

        def bind(x):
            if len(x) < self.LEAST_TOKENS:
                raise LeftOut("it keeps equal weights once: copies would not be cold")
            x = torch.from_numpy(x)
            return [lambda: method.execute([x])[0]], lambda y: y.numpy()

        bind.program = program  # which the method borrows from
        return bind


LIBRARIES = {"nibble": Nibble, "onnxruntime": OnnxRuntime, "openvino": OpenVino, "torch": Torch, "xnnpack": Xnnpack}


def weights(scheme, n, k):
    """A seeded weight as arrays that all libraries read: w, its codes [N,K], scales [N,K/group] and zeros, and w dequantized."""
    import nibble

    w = np.random.default_rng(n * k).standard_normal((n, k), np.float32)
    q = nibble.quantize(w, scheme)
    scales = np.asarray(q.scales, np.float32).reshape(n, -1)
    codes = np.asarray(q.codes)
    zeros = None if q.zeros is None else np.asarray(q.zeros, np.uint8).reshape(n, -1)
    if scheme == "s8c":
        codes = codes.view(np.int8).copy()
    offset = 0 if scheme == "s8c" else 8 if zeros is None else np.repeat(zeros.astype(np.float32), k // zeros.shape[1], axis=1)
    return {"w": w, "codes": codes, "scales": scales, "zeros": zeros, "dense": (codes.astype(np.float32) - offset) * np.repeat(scales, k // scales.shape[1], axis=1)}


def worker(library, threads):
    """Answers lines of JSON: a layer and activations to bind to it, or a time for which to run it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere

    def answer(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    try:
        lib = LIBRARIES[library](threads)
    except ImportError as e:
        return answer(left_out=str(e))
    answer(version=lib.version())
    calls, at, known, quantized, bind, why = [], 0, None, None, None, ""
    for line in sys.stdin:
        ask = json.loads(line)
        if "mode" in ask:
            mode, n, k, m = MODES[ask["mode"]], ask["n"], ask["k"], ask["m"]
            x = np.random.default_rng(m).standard_normal((m, k), np.float32)
            try:
                if known != (mode, n, k):
                    calls, bind = [], None  # the last layer's memory is free
                    if known is None or (known[0][0], *known[1:]) != (mode[0], n, k):
                        quantized = weights(mode[0], n, k)
                    known, size = (mode, n, k), n * k // (1 if mode[0] == "s8c" else 2)
                    bind = lib.layers(mode, quantized, min(MOST_COPIES, -(-COLD_BYTES // size)))
                if bind is None:
                    raise LeftOut(why)
                calls, array = bind(x)
                truth = x @ quantized["dense"].T
                error = float(np.linalg.norm(array(calls[0]()) - truth) / np.linalg.norm(truth))
                if not error < MOST_ERROR:
                    raise LeftOut(f"relative error {error:.2g}")
                for call in calls:
                    call()
                answer(error=error)
            except Exception as e:  # whatever a peer throws is its reason
                why = str(e) if isinstance(e, LeftOut) else f"{type(e).__name__}: {e}".splitlines()[0][:200]
                answer(left_out=why)
            continue
        times, end = [], time.perf_counter() + ask["seconds"]
        calls[at % len(calls)]()  # wakes its threads
        while not times or time.perf_counter() < end:
            at += 1
            begin = time.perf_counter()
            calls[at % len(calls)]()
            times.append((time.perf_counter() - begin) * 1e6)
        answer(us=statistics.median(times))


class Worker:
    def __init__(self, library, threads):
        command = [sys.executable, __file__, "--worker", library, "--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "NIBBLE_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.hello = self.read()

    def read(self):
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"left_out": "its process ended"}

    def ask(self, **fields):
        print(json.dumps(fields), file=self.process.stdin, flush=True)
        return self.read()


def measured(workers, mode, n, k, m, rounds, seconds):
    """The result of a cell: medians, errors, and who was left out and why."""
    result = {"mode": mode, "n": n, "k": k, "m": m, "us": {}, "error": {}, "left_out": {}}
    for name, w in workers.items():
        said = w.ask(mode=mode, n=n, k=k, m=m)
        if "error" in said:
            result["error"][name] = float(f"{said['error']:.2g}")
        else:
            result["left_out"][name] = said["left_out"]
    times = {name: [] for name in result["error"]}
    for _ in range(rounds):
        for name in random.sample(list(times), len(times)):
            time.sleep(0.02)  # threads of the last library stop spinning
            times[name].append(workers[name].ask(seconds=seconds)["us"])
    result["us"] = {name: round(statistics.median(t), 1) for name, t in times.items()}
    return result


def described():
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def text(data):
    """A result a line. Reasons to leave a library out stand in front, once; results have their places."""
    reasons = sorted({reason for r in data["results"] for reason in r["left_out"].values()})
    rows = [{**r, "left_out": {name: reasons.index(reason) for name, reason in r["left_out"].items()}} for r in data["results"]]
    data = {**data, "reasons": reasons, "results": rows}
    head = json.dumps({key: value for key, value in data.items() if key != "results"}, ensure_ascii=False, indent=1)
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in data["results"])
    return f'{head.removesuffix("}").rstrip()},\n "results": [\n{rows}\n ]\n}}\n'


def shapes_of(path):
    for line in path.read_text().splitlines():
        if words := line.split("#")[0].split():
            yield int(words[0]), int(words[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("-M", default="1,4,16,64,256")
    parser.add_argument("--shapes", type=pathlib.Path, default=ROOT / "bench/shapes/llama3-8b.txt")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each round and library")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", choices=LIMITS, help="the instructions that libraries keep to; all that this CPU has otherwise")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker, args.threads)
    modes = args.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        sys.exit(f"cpu_peers.py: no mode {', '.join(unknown)}; there are {', '.join(MODES)}")

    os.environ.update(LIMITS.get(args.isa, {}))
    import nibble

    workers = {name: Worker(name, args.threads) for name in LIBRARIES if args.isa is None or name in LIMITED}
    for name, w in list(workers.items()):
        if "left_out" in w.hello:
            print(f"{name} is left out: {w.hello['left_out']}", file=sys.stderr)
            del workers[name]
    doctor = nibble.doctor()
    data = {"schema": 1, "device": {"cpu": doctor["cpu"], "isa": doctor["isa"], "threads": args.threads},
            "commit": described(), "date": datetime.datetime.now().isoformat(timespec="seconds"), "versions": {name: w.hello["version"] for name, w in workers.items()},
            "results": []}  # fmt: skip
    for mode in modes:
        for n, k in shapes_of(args.shapes):
            for m in map(int, args.M.split(",")):
                r = measured(workers, mode, n, k, m, args.rounds, args.seconds)
                data["results"].append(r)
                if args.json:  # what is measured stays when the rest is not waited for
                    part = args.json.with_name(args.json.name + ".part")
                    part.write_text(text(data))
                    part.replace(args.json)
                peers = {name: t for name, t in r["us"].items() if name != "nibble"}
                best = min(peers, key=peers.get, default=None)
                ratio = f"{peers[best] / r['us']['nibble']:.2f}× of {best}" if best and "nibble" in r["us"] else ""
                print(f"{mode:18} {n:6}×{k:<6} M={m:<5}" + "".join(f" {name} {t:.0f}" for name, t in r["us"].items()) + f" µs  {ratio}", flush=True)
    for name in workers:
        reasons = {(r["mode"], r["left_out"][name]) for r in data["results"] if name in r["left_out"]}
        for mode, reason in sorted(reasons):
            print(f"{name} × {mode}: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
