"""nibble.vllm: the tensors of vLLM's layers, in plain torch; and vLLM's own classes, where that can be imported: on its CUDA platform where
there is a GPU for nibble and PyTorch, and there in CUDA graphs as well, else on its CPU platform. Whole models in vLLM's engine, where it is
built for the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ROOT, distance

import nibble

torch = pytest.importorskip("torch")
import nibble.torch as nt  # noqa: E402
import nibble.vllm  # noqa: E402
from nibble.vllm import _weights  # noqa: E402

N, K, G = 64, 256, 64
HALF = torch.float16
GPU = torch.cuda.is_available() and nibble.doctor()["gpu"] is not None
DEVICE = torch.device("cuda" if GPU else "cpu")
NEAR, CODES_NEAR = (5e-3, 1e-2) if GPU else (2e-3, 2e-3)  # tensor cores add products of FP8 with fewer bits than f32 has


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def words(codes, bits, dim):
    """32 / bits codes a word along `dim`, the first one in the lowest bits."""
    grouped = codes.long().movedim(dim, -1).unflatten(-1, (-1, 32 // bits))
    packed = sum(grouped[..., i] << (bits * i) for i in range(32 // bits))
    return (packed - ((packed >> 31) << 32)).to(torch.int32).movedim(-1, dim).contiguous()


class Grouped:
    """Random codes, scales and zero points of W[N,K], and the W that they are."""

    def __init__(self, bits=4, zeros=False, group=G, act_order=False):
        groups = K // group if group > 0 else 1
        self.codes = torch.randint(0, 1 << bits, (N, K))
        self.zeros = torch.randint(0, 1 << bits, (N, groups)) if zeros else None
        self.scales = (torch.rand(N, groups) * 0.1 + 0.01).half()
        self.g_idx = (torch.arange(K) // (K // groups))[torch.randperm(K) if act_order else torch.arange(K)]
        zero = self.zeros[:, self.g_idx] if zeros else 1 << (bits - 1)
        self.w = (self.codes - zero).float() * self.scales.float()[:, self.g_idx]


def linear(packed, x, n, bias=None):
    return torch.ops.nibble.linear(x, packed, n, bias, "none", None)


def int8():
    return torch.randint(-128, 128, (N, K), dtype=torch.int8)


def fp8():
    return torch.randn(N, K).to(torch.float8_e4m3fn)


def dequantized(x, act_scheme, scale=None, zero=0):
    """What x becomes as codes, as floats."""
    codes, scales, zeros = nibble.quantize_activations(x, act_scheme, scale=scale, zero=zero)
    codes = codes.float() - (zero if zeros is None else zeros.unsqueeze(-1))
    return codes * (scale if scales is None else scales.unsqueeze(-1))


# --- the tensors, without vLLM --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [G, -1])
@pytest.mark.parametrize("act_order", [False, True])
def test_groups(bits, zeros, group, act_order):
    layer = Grouped(bits, zeros, group, act_order)
    zero_point = words(layer.zeros, bits, 0) if zeros else None
    g_idx = layer.g_idx.int() if act_order else None
    q = _weights.grouped(words(layer.codes, bits, 1), layer.scales, zero_point, g_idx, n=N, k=K, bits=bits, group_size=group)
    assert q.scheme == _weights.grouped_scheme(bits, 0 if zeros else 1 << (bits - 1), zeros, group, K, K)
    packed = _weights.pack(q, torch.device("cpu"), HALF)
    assert packed.dtype == torch.uint8 and packed.ndim == 1 and nt.from_tensor(packed).a_dtype == "f16"
    assert torch.equal(torch.ops.nibble.dequantize(packed, N, K, torch.float32), layer.w)
    x, bias = torch.randn(3, K).half(), torch.randn(N).half()
    assert distance(linear(packed, x, N, bias).float(), x.float() @ layer.w.T + bias.float()) < NEAR


def test_groups_that_are_refused():
    with pytest.raises(nibble.Unsupported, match="weights of 4 bits less 0 without zero points.*less 8"):
        _weights.grouped_scheme(4, 0, False, G, K, K)
    for group in (128, 768):
        with pytest.raises(nibble.Unsupported, match=f"groups of {group} input channels do not divide 192.*part of 768; .*tensor_parallel_size"):
            _weights.grouped_scheme(4, 8, False, group, 192, 768)
    with pytest.raises(nibble.Unsupported, match="groups of 128 input channels do not divide 192$"):
        _weights.grouped_scheme(4, 8, False, 128, 192, 192)
    assert _weights.grouped_scheme(4, 8, False, 192, 192, 768) == "u4b8c"
    with pytest.raises(nibble.Unsupported, match="torch.int8.*float16, bfloat16"):
        _weights.a_dtype(torch.int8)


@pytest.mark.parametrize("make", [int8, fp8])
@pytest.mark.parametrize("scales", [1, 2, N])
@pytest.mark.parametrize("static", [False, True])
def test_codes(make, scales, static):
    weight, scale = make(), torch.rand(scales) * 0.1 + 0.01
    widths = [N // 4, N - N // 4]  # of two layers that are joined
    zeros = make is int8
    act_scheme = f"{'s8z' if zeros else 'e4m3'}{'t' if static else 'r'}"
    a_scale, a_zero = torch.tensor([0.03]), torch.tensor([-7], dtype=torch.int8) if zeros else None
    q = _weights.codes(weight, scale, widths=widths, static=(a_scale, a_zero) if static else None)
    spread = scale.repeat_interleave(torch.tensor(widths)) if scales == 2 else scale
    w = weight.float() * spread.unsqueeze(-1)
    packed = _weights.pack(q, torch.device("cpu"), HALF, act_scheme)
    assert torch.equal(torch.ops.nibble.dequantize(packed, N, K, torch.float32), w)
    x = torch.randn(3, K).half()
    known = {"scale": float(a_scale), "zero": -7 if zeros else 0} if static else {}
    assert distance(linear(packed, x, N).float(), dequantized(x, act_scheme, **known) @ w.T) < NEAR


def test_codes_of_joined_layers():
    weight, scale = int8(), torch.rand(N)
    assert _weights.codes(weight, scale, static=(torch.tensor([0.02, 0.03]), None)).static_acts == (pytest.approx(0.03), 0)
    with pytest.raises(nibble.Unsupported, match="zero points .1, 2.; nibble takes one of each"):
        _weights.codes(weight, scale, static=(torch.tensor([0.02, 0.02]), torch.tensor([1, 2])))
    with pytest.raises(nibble.InvalidArgument, match="weight_scale has shape .3.*takes 1 or 64 scales"):
        _weights.codes(weight, torch.rand(3), widths=[N // 2, N // 2])
    assert _weights.codes(fp8(), scale, limit=torch.tensor(2.5)).act_limit == 2.5


def test_blocks():
    n, k = 192, 320  # blocks at the edges are smaller
    weight, scale = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.1
    q = _weights.blocks(weight, scale, (128, 128))
    w = weight.float() * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    packed = _weights.pack(q, torch.device("cpu"), torch.bfloat16, "e4m3g128")
    assert torch.equal(torch.ops.nibble.dequantize(packed, n, k, torch.float32), w)
    x = torch.randn(3, k).bfloat16()
    y = linear(packed, x, n)
    assert y.dtype == torch.bfloat16 and distance(y.float(), x.float() @ w.T) < 0.05


@pytest.mark.parametrize("scheme", ["u4b8g128", "u4zg64", "u8b128c", "u3b4g128", "s8c", "e4m3t", "e4m3c", "e4m3b128x128"])
def test_what_is_taken(scheme):
    assert _weights.refusal(scheme, K, HALF, backend="cpu") == ""
    assert _weights.refusal(scheme, K, torch.int8, backend="cpu").startswith("activations of torch.int8")


def test_what_is_refused():
    assert "groups" in _weights.refusal("u4b8g48", 480, HALF, "s8g128", backend="cpu")
    assert "only the reference kernel, which is slow" in _weights.refusal("e4m3c", K, HALF, "s8r", backend="cpu")
    if nibble.doctor()["gpu"] is None:
        assert _weights.refusal("u4b8g128", K, HALF) == _weights.refusal("u4b8g128", K, HALF, backend="cuda") != ""


def test_the_entry_point():
    tomllib = pytest.importorskip("tomllib")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"nibble": "nibble.vllm:register"} and callable(nibble.vllm.register)


def test_the_switch(monkeypatch):
    monkeypatch.setenv("NIBBLE_VLLM", "no")
    with pytest.raises(nibble.InvalidArgument, match="NIBBLE_VLLM is 'no'; write 1 .* 0"):
        nibble.vllm.register()


# --- vLLM's classes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernels():
    """nibble.vllm._kernels, registered for the platform of DEVICE, which this vLLM then has."""
    pytest.importorskip("vllm", exc_type=ImportError)
    import vllm.platforms

    if GPU:
        here = pytest.importorskip("vllm.platforms.cuda", exc_type=ImportError).CudaPlatform
    else:
        from vllm.platforms.cpu import CpuPlatform as here
    vllm.platforms._current_platform = here()
    from nibble.vllm import _kernels

    _kernels.register(here._enum)
    return _kernels


@pytest.fixture
def platform(kernels):
    return kernels.current_platform._enum


@pytest.fixture
def rank(kernels, monkeypatch):
    """Says which rank of how many this process is, as parameters are made for and loaded."""
    from vllm.model_executor import parameter

    def be(rank, ranks):
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
        monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: ranks)

    be(0, 1)
    return be


def grouped_config(kernels, *, k=K, whole_k=None, bits=4, group=128, zeros=False, act_order=False, dtype=HALF, weight_type=None):
    from vllm.scalar_type import scalar_types

    fields = {field.name for field in dataclasses.fields(kernels.MPLinearLayerConfig)}
    return kernels.MPLinearLayerConfig(
        full_weight_shape=(whole_k or k, N), partition_weight_shape=(k, N), act_type=dtype, group_size=group, zero_points=zeros,
        weight_type=getattr(scalar_types, weight_type or (f"uint{bits}" if zeros else f"uint{bits}b{1 << (bits - 1)}")),
        **({"has_g_idx": act_order} if "has_g_idx" in fields else {}),
    )  # fmt: skip


def test_signatures(kernels):
    """A method that takes the place of vLLM's is called as that is."""
    for _, kernel, _ in kernels._KERNELS:
        assert not inspect.isabstract(kernel)
        base = kernel.__mro__[1]
        for name in [name for name in vars(kernel) if hasattr(base, name) and callable(getattr(base, name)) and not name.startswith("__")]:
            ours, theirs = (inspect.signature(getattr(owner, name)).parameters.values() for owner in (kernel, base))
            assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs], f"{kernel.__name__}.{name}"


def test_registration(kernels, platform, monkeypatch):
    lists = {kind: getattr(kernels.linear, name)[platform] for kind, _, name in kernels._KERNELS}
    before = {kind: list(kernels_) for kind, kernels_ in lists.items()}
    for kind, kernel, _ in kernels._KERNELS:
        if kind == "fp8_block" and '"fp8_block"' not in inspect.getsource(kernels.register_linear_kernel):
            assert kernel not in lists[kind]  # this vLLM has no hook for them
        else:
            assert lists[kind][0] is kernel and lists[kind].count(kernel) == 1 and len(lists[kind]) > 1
    kernels.register(platform)
    assert before == lists
    from vllm import envs

    assert envs.compile_factors()["NIBBLE_VLLM"] == nibble.__version__
    monkeypatch.setenv("NIBBLE_VLLM", "0")
    lists, ours = kernels.linear._POSSIBLE_KERNELS, kernels.NibbleLinearKernel
    theirs = {here: [kernel for kernel in lists[here] if kernel is not ours] for here in (kernels.PlatformEnum.CUDA, kernels.PlatformEnum.CPU)}
    for here, others in theirs.items():
        monkeypatch.setitem(lists, here, list(others))
    nibble.vllm.register()
    assert all(lists[here] == others for here, others in theirs.items())
    monkeypatch.setenv("NIBBLE_VLLM", "1")
    nibble.vllm.register()
    assert all(lists[here] == [ours, *others] for here, others in theirs.items())


def test_activations_of_4_bit_weights(kernels, monkeypatch):
    """Quantized where vLLM's own kernel on the CPU would do it."""
    if not hasattr(kernels.envs, "VLLM_CPU_INT4_W4A8"):
        pytest.skip("this vLLM does not quantize them")
    act_scheme = kernels.NibbleLinearKernel._act_scheme
    amx = not GPU and nibble.doctor()["isa"] == "amx"
    for wanted in (False, True):
        monkeypatch.setattr(kernels.envs, "VLLM_CPU_INT4_W4A8", wanted)
        assert act_scheme(grouped_config(kernels, dtype=torch.bfloat16)) == ("s8r" if wanted and amx else "")
        assert act_scheme(grouped_config(kernels)) == act_scheme(grouped_config(kernels, bits=8, dtype=torch.bfloat16)) == ""


def test_selection(kernels, monkeypatch):
    choose = kernels.linear.choose_mp_linear_kernel
    for options in ({}, {"bits": 8, "group": -1}, {"zeros": True}, {"k": 3 * K, "group": 96}, {"dtype": torch.bfloat16}, {"bits": 3}):
        assert choose(grouped_config(kernels, **options)) is kernels.NibbleLinearKernel
    uneven = grouped_config(kernels, k=K - 32, whole_k=4 * K - 128, bits=8)
    assert f"do not divide {K - 32}, this rank's part of {4 * K - 128};" in kernels.NibbleLinearKernel.can_implement(uneven)[1]
    if not GPU:  # there no other kernel takes it, and vLLM says why
        with pytest.raises(ValueError, match=f"NibbleLinearKernel cannot implement due to: .* do not divide {K - 32}, "):
            choose(uneven)
    for weight_type in ("int4", "float4_e2m1f", "uint4"):
        taken, reason = kernels.NibbleLinearKernel.can_implement(grouped_config(kernels, weight_type=weight_type))
        assert not taken and "nibble takes" in reason
    config = grouped_config(kernels, act_order=True, k=K, whole_k=2 * K)
    if hasattr(config, "has_g_idx"):
        assert choose(grouped_config(kernels, act_order=True)) is kernels.NibbleLinearKernel
        taken, reason = kernels.NibbleLinearKernel.can_implement(config)
        assert not taken and "act-order, of which this rank has 256 of 512 input channels" in reason
    monkeypatch.setattr(kernels.envs, "VLLM_BATCH_INVARIANT", True)
    taken, reason = kernels.NibbleLinearKernel.can_implement(grouped_config(kernels))
    assert not taken and "VLLM_BATCH_INVARIANT" in reason
    monkeypatch.undo()
    monkeypatch.setattr(kernels.envs, "VLLM_DISABLED_KERNELS", ["NibbleLinearKernel"])
    assert choose(grouped_config(kernels, k=512)) is not kernels.NibbleLinearKernel


@contextlib.contextmanager
def model_dtype():
    """While vLLM loads, the default type is the model's."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(HALF)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Layer(torch.nn.Module):
    def __init__(self, prefix="model.layers.0.mlp.down_proj"):
        super().__init__()
        self.prefix, self.logical_widths = prefix, [N]


def created(method, k=K, whole_k=None, widths=(N,), weight_loader=lambda *args: None):
    layer = Layer()
    with model_dtype(), DEVICE:
        method.create_weights(
            layer=layer, input_size_per_partition=k, output_partition_sizes=list(widths), input_size=whole_k or k, output_size=N,
            params_dtype=HALF, weight_loader=weight_loader,
        )  # fmt: skip
    return layer


def load(layer, **tensors):
    """By the loaders of vLLM's parameters, which take this rank's input channels."""
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        loader = getattr(parameter, "load_row_parallel_weight", None)
        (loader or parameter.data.copy_)(tensor)


def check(layer, apply, w, held, freed=(), near=NEAR, x_of=torch.Tensor.float):
    """One tensor of bytes is left; what it computes, eagerly and compiled, and in graphs, is the product with w."""
    assert getattr(layer, held).dtype == torch.uint8 and getattr(layer, held).ndim == 1 and getattr(layer, held).device.type == DEVICE.type
    assert all(getattr(layer, name).numel() == 0 for name in freed)
    x, bias = torch.randn(2, 3, w.shape[1], device=DEVICE).half(), torch.randn(w.shape[0], device=DEVICE).half()
    exact = x_of(x.cpu().flatten(0, 1)).unflatten(0, (2, 3)) @ w.T
    torch._dynamo.reset()  # each layer is another graph
    for call in (apply, torch.compile(apply, fullgraph=True, backend="eager")):
        with torch.inference_mode():
            y, without = call(layer, x, bias), call(layer, x, None)
        assert type(y) is torch.Tensor and y.dtype == HALF and y.device == x.device
        assert distance(without.float().cpu(), exact) < near and distance(y.float().cpu(), exact + bias.float().cpu()) < near
    if GPU:
        check_graphs(layer, apply, w, (64, 8, 1), bias, near, x_of)


@torch.inference_mode()
def check_graphs(layer, apply, w, sizes, bias, near, x_of):
    """As the engine captures them: each number of tokens once without a graph, the largest first, and then into a pool of all of them."""
    pool, captured = torch.cuda.graph_pool_handle(), []
    for m in sizes:
        x = torch.randn(m, w.shape[1], device=DEVICE).half()
        apply(layer, x, bias)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = apply(layer, x, bias)
        captured.append((graph, x, y))
    for graph, x, y in captured:
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, apply(layer, x, bias)), x.shape
        assert distance(y.float().cpu(), x_of(x.cpu()) @ w.T + bias.float().cpu()) < near, x.shape


def gptq(bits=4, group=G, act_order=False, monkeypatch=None):
    from vllm.model_executor.layers.quantization import auto_gptq

    monkeypatch.setattr(auto_gptq, "verify_marlin_supported", lambda **_: None)  # which asks for a GPU
    config = auto_gptq.AutoGPTQConfig(bits, group, act_order, True, False, {}, {})
    return auto_gptq.AutoGPTQLinearMethod(config)


@pytest.mark.parametrize(("bits", "group"), [(4, G), (8, G), (4, -1)])
def test_gptq(kernels, rank, monkeypatch, bits, group):
    weight, method = Grouped(bits, group=group), gptq(bits, group, monkeypatch=monkeypatch)
    layer = created(method)
    load(layer, qweight=words(weight.codes.T, bits, 0), scales=weight.scales.T)
    method.process_weights_after_loading(layer)
    assert type(method.kernel) is kernels.NibbleLinearKernel
    check(layer, method.apply, weight.w, "qweight", ("scales", "qzeros"))


def test_gptq_act_order(kernels, rank, monkeypatch):
    if "has_g_idx" not in {field.name for field in dataclasses.fields(kernels.MPLinearLayerConfig)}:
        pytest.skip("this vLLM refuses act-order itself")
    weight, method = Grouped(act_order=True), gptq(act_order=True, monkeypatch=monkeypatch)
    layer = created(method)
    load(layer, qweight=words(weight.codes.T, 4, 0), scales=weight.scales.T, g_idx=weight.g_idx.int())
    method.process_weights_after_loading(layer)
    check(layer, method.apply, weight.w, "qweight", ("scales", "qzeros", "g_idx"))


def test_awq(kernels, rank):
    from vllm.model_executor.layers.quantization import auto_awq

    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the code of each nibble
    weight = Grouped(zeros=True)
    config = auto_awq.AutoAWQConfig(4, G, True, False, [], {})
    method = auto_awq.AutoAWQMarlinLinearMethod(config)
    layer = created(method)
    qweight, qzeros = (words(t.T.unflatten(1, (-1, 8))[..., order].flatten(1), 4, 1) for t in (weight.codes, weight.zeros))
    load(layer, qweight=qweight, qzeros=qzeros, scales=weight.scales.T)
    method.process_weights_after_loading(layer)
    check(layer, method.apply, weight.w, "qweight", ("scales", "qzeros"))


def wna16(bits, zeros, group, **options):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    strategy = "channel" if group == -1 else "group"
    return CompressedTensorsWNA16(strategy, bits, None if group == -1 else group, symmetric=not zeros, **options)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [G, -1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compressed_tensors(kernels, rank, bits, zeros, group, ranks):
    """Also as the second of two ranks, which has the second half of the input channels."""
    rank(ranks - 1, ranks)
    weight, method = Grouped(bits, zeros, group), wna16(bits, zeros, group)
    layer = created(method, K // ranks, K)
    zero_point = {"weight_zero_point": words(weight.zeros, bits, 0)} if zeros else {}
    load(layer, weight_packed=words(weight.codes, bits, 1), weight_scale=weight.scales, **zero_point)
    method.process_weights_after_loading(layer)
    freed = ("weight_scale", "weight_zero_point") if zeros else ("weight_scale",)
    check(layer, method.apply_weights, weight.w[:, K - K // ranks :], "weight_packed", freed)


def test_a_weight_that_cannot_be_read(kernels, rank):
    method = wna16(4, False, G)
    layer = created(method)
    load(layer, weight_packed=words(torch.zeros(N, K), 4, 1), weight_scale=torch.ones(N, K // G).half())
    layer.weight_scale.data = layer.weight_scale.data[:, :3]
    with pytest.raises(nibble.Error, match="model.layers.0.mlp.down_proj: .*VLLM_DISABLED_KERNELS=NibbleLinearKernel"):
        method.process_weights_after_loading(layer)
    layer.prefix = "model.layers.0.attn.wo_a"
    with pytest.raises(nibble.Unsupported, match="wo_a: DeepSeek-V4 .*VLLM_DISABLED_KERNELS=NibbleLinearKernel"):
        method.process_weights_after_loading(layer)
    assert layer.weight_packed.dtype == torch.int32 and layer.weight_scale.shape == (N, 3)


def test_a_weight_that_is_loaded_anew(kernels, vllm_config):
    """vLLM copies it into the memory of the first one, whose header a captured graph has read."""

    def load_into(layer, codes, static):
        layer.weight, layer.weight_scale, layer.input_scale = parameter(codes.t()), parameter(torch.tensor(0.05)), parameter(static)
        kernel.process_weights_after_loading(layer)

    kernel, layer = fp8_kernel("kFp8StaticTensorSym", "kFp8StaticTensorSym"), Layer()
    load_into(layer, fp8(), torch.tensor(0.02))
    codes, held, x = fp8(), layer.weight, torch.randn(3, K, device=DEVICE).half()
    load_into(layer, codes, torch.tensor(0.02))
    held.data.copy_(layer.weight)
    layer.weight = held
    exact = dequantized(x.cpu(), "e4m3t", scale=0.02) @ codes.float().T * 0.05
    assert distance(kernel.apply_weights(layer, x).float().cpu(), exact) < CODES_NEAR
    with pytest.raises(nibble.Unsupported, match="down_proj: .*another static scale.*restart vLLM"):
        load_into(layer, codes, torch.tensor(0.03))


def test_vllm_reloads(kernels, rank, monkeypatch):
    """By its own functions, into the memory that graphs have captured."""
    from vllm.model_executor.model_loader import reload

    first, second, method = Grouped(), Grouped(), gptq(monkeypatch=monkeypatch)
    layer = created(method, weight_loader=lambda param, tensor: param.load_row_parallel_weight(tensor))
    layer.quant_method = method
    model = torch.nn.ModuleList([layer])

    def load_all(weight):
        parts = {"qweight": words(weight.codes.T, 4, 0), "scales": weight.scales.T, "qzeros": torch.zeros(K // G, N // 8, dtype=torch.int32)}
        if hasattr(layer, "g_idx"):
            parts["g_idx"] = weight.g_idx.int()
        for name, tensor in parts.items():
            getattr(layer, name).weight_loader(getattr(layer, name), tensor)

    with DEVICE:
        reload.record_metadata_for_reloading(model)
    load_all(first)
    method.process_weights_after_loading(layer)
    check(layer, method.apply, first.w, "qweight", ("scales",))
    address = layer.qweight.data_ptr()
    reload.initialize_layerwise_reload(model)
    load_all(second)
    reload.finalize_layerwise_reload(model, None)
    assert layer.qweight.data_ptr() == address
    check(layer, method.apply, second.w, "qweight", ("scales",))


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_int8(kernels, rank, strategy, static, symmetric):
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8

    widths = [N // 4, N - N // 4]
    method = CompressedTensorsW8A8Int8(strategy, static, symmetric)
    layer = created(method, widths=widths)
    weight, scale = int8(), torch.rand(N, 1) * 0.01 + 0.001 if strategy == "channel" else torch.rand(2) * 0.01 + 0.001
    layer.weight.data.copy_(weight)
    layer.weight_scale.data.copy_(scale)
    known = {}
    if static:
        layer.input_scale.data.fill_(0.03)
        known = {"scale": float(layer.input_scale), "zero": 0 if symmetric else -7}
        if not symmetric:
            layer.input_zero_point.data.fill_(-7)
    with model_dtype():
        method.process_weights_after_loading(layer)
    assert type(method.kernel) is kernels.NibbleInt8LinearKernel
    spread = scale if strategy == "channel" else scale.repeat_interleave(torch.tensor(widths)).unsqueeze(-1)
    act_scheme = f"s8{'' if symmetric else 'z'}{'t' if static else 'r'}"
    w, x_of = weight.float() * spread, lambda x: dequantized(x, act_scheme, **known)
    check(layer, method.apply_weights, w, "weight", ("weight_scale",), near=CODES_NEAR, x_of=x_of)


@pytest.fixture
def vllm_config(kernels):
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def fp8_kernel(weight_key, activation_key, shape=(N, K)):
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils import quant_utils

    return init_fp8_linear_kernel(
        getattr(quant_utils, activation_key), getattr(quant_utils, weight_key), weight_shape=shape, input_dtype=HALF, out_dtype=HALF
    )


def parameter(tensor):
    return torch.nn.Parameter(tensor.to(DEVICE), requires_grad=False)


@pytest.mark.parametrize("weights", ["Tensor", "Channel", "Token"])  # FBGEMM's layers say Token for a row of W
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["o_proj", "kv_b_proj"])
def test_fp8(kernels, vllm_config, weights, static, name):
    from vllm.model_executor.layers.quantization.utils import fp8_utils

    kernel = fp8_kernel(f"kFp8Static{weights}Sym", "kFp8StaticTensorSym" if static else "kFp8DynamicTokenSym")
    assert type(kernel) is kernels.NibbleFp8LinearKernel and kernel.input_quant_key() is None
    layer, codes = Layer(f"model.layers.0.self_attn.{name}"), fp8()
    scale = torch.rand(N, 1) * 0.1 + 0.01 if weights != "Tensor" else torch.tensor(0.05)
    weight, scale, _ = fp8_utils.process_fp8_weight_channel_strategy(codes, scale)
    layer.weight, layer.weight_scale = parameter(weight if weight.shape == (K, N) else weight.t()), parameter(scale)  # older ones leave [N,K]
    layer.input_scale = parameter(torch.tensor(0.02)) if static else None
    kernel.process_weights_after_loading(layer)
    w, act_scheme = codes.float() * scale, "e4m3t" if static else "e4m3r"
    known = {"scale": float(layer.input_scale)} if static else {}
    kept = name == "kv_b_proj"  # vLLM reads it
    assert torch.equal(layer.weight.float().cpu(), codes.T.float()) if kept else layer.weight.dtype == torch.uint8
    held = "nibble_packed" if kept else "weight"
    x_of = lambda x: dequantized(x, act_scheme, **known)  # noqa: E731
    check(layer, kernel.apply_weights, w, held, () if kept else ("weight_scale",), near=CODES_NEAR, x_of=x_of)
    a, a_scale = torch.randn(3, K).to(torch.float8_e4m3fn), torch.rand(1 if static else 3) + 0.1
    y = kernel.apply_scaled_mm(
        A=a.to(DEVICE), B=getattr(layer, held), out_dtype=HALF, As=a_scale.unsqueeze(-1).to(DEVICE), Bs=scale, bias=None, output_shape=[3, N]
    )
    assert y.shape == (3, N) and distance(y.float().cpu(), (a.float() * a_scale.unsqueeze(-1)) @ w.T) < CODES_NEAR


def test_fp8_that_is_refused(kernels, vllm_config):
    config = kernels.FP8ScaledMMLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils import quant_utils

    for weight, activation in (("kFp8StaticTensorSym", "kFp8DynamicTensorSym"), ("kFp8Static128BlockSym", "kFp8DynamicTokenSym")):
        keys = getattr(quant_utils, weight), getattr(quant_utils, activation)
        taken, reason = kernels.NibbleFp8LinearKernel.can_implement(config(*keys, (N, K), HALF, HALF))
        assert not taken and "nibble takes float8_e4m3fn per t" in reason
    keys = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8DynamicTokenSym
    taken, reason = kernels.NibbleFp8BlockLinearKernel.can_implement(config(*keys, (N, K), HALF, HALF))
    assert not taken and "in groups of channels" in reason


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("kind", ["float32", "float8_e8m0fnu"])
def test_fp8_blocks(kernels, vllm_config, name, kind):
    n, k = 192, 320
    keys = ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")
    from vllm.model_executor.layers.quantization.utils import quant_utils

    config = kernels.FP8ScaledMMLinearLayerConfig(*(getattr(quant_utils, key) for key in keys), (n, k), HALF, HALF)
    kernel = kernels.NibbleFp8BlockLinearKernel(config)
    assert kernel.can_implement(config) == (True, None)
    if '"fp8_block"' in inspect.getsource(kernels.register_linear_kernel):
        assert type(fp8_kernel(*keys, (n, k))) is kernels.NibbleFp8BlockLinearKernel
    codes, scale = torch.randn(n, k).to(torch.float8_e4m3fn), (torch.rand(2, 3) * 0.1 + 0.01).to(getattr(torch, kind))
    layer = Layer()
    layer.weight = parameter(codes)
    setattr(layer, name, parameter(scale))
    kernel.process_weights_after_loading(layer)
    w = codes.float() * scale.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    check(layer, kernel.apply_weights, w, "weight", (name,), near=0.05)


@pytest.mark.parametrize("kind", ["w4a16", "w4a16 zero points", "int8", "fp8"])
def test_in_graphs_as_the_engine(kernels, rank, vllm_config, kind):
    """Layers of a model's size, through vLLM's classes, for the numbers of tokens that the engine captures."""
    if not GPU:
        pytest.skip("there is no GPU for nibble and PyTorch: " + nibble.doctor().get("gpu_reason", "PyTorch without CUDA"))
    n, k, group = 3072, 2048, 128
    x_of, near = torch.Tensor.float, NEAR
    if kind.startswith("w4a16"):
        zeros = "zero" in kind
        codes, scale = torch.randint(0, 16, (n, k)), (torch.rand(n, k // group) * 0.01 + 0.001).half()
        zero = torch.randint(0, 16, (n, k // group)) if zeros else torch.full((n, k // group), 8)
        w = (codes - zero.repeat_interleave(group, 1)).float() * scale.float().repeat_interleave(group, 1)
        method = wna16(4, zeros, group)
        layer = created(method, k, widths=(n,))
        zero_point = {"weight_zero_point": words(zero, 4, 0)} if zeros else {}
        load(layer, weight_packed=words(codes, 4, 1), weight_scale=scale, **zero_point)
        method.process_weights_after_loading(layer)
        assert type(method.kernel) is kernels.NibbleLinearKernel
        apply = method.apply_weights
    elif kind == "int8":
        from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8

        method = CompressedTensorsW8A8Int8("channel", False, True)
        layer = created(method, k, widths=(n,))
        layer.logical_widths = [n]
        codes, scale = torch.randint(-128, 128, (n, k), dtype=torch.int8), torch.rand(n, 1) * 0.001 + 0.0001
        load(layer, weight=codes, weight_scale=scale)
        with model_dtype():
            method.process_weights_after_loading(layer)
        assert type(method.kernel) is kernels.NibbleInt8LinearKernel
        w, apply, near, x_of = codes.float() * scale, method.apply_weights, CODES_NEAR, lambda x: dequantized(x, "s8r")
    else:
        kernel = fp8_kernel("kFp8StaticChannelSym", "kFp8DynamicTokenSym", (n, k))
        assert type(kernel) is kernels.NibbleFp8LinearKernel
        codes, scale, layer = torch.randn(n, k).to(torch.float8_e4m3fn), torch.rand(n, 1) * 0.01 + 0.001, Layer()
        layer.weight, layer.weight_scale, layer.input_scale = parameter(codes.t()), parameter(scale), None
        kernel.process_weights_after_loading(layer)
        w, apply, near, x_of = codes.float() * scale, kernel.apply_weights, CODES_NEAR, lambda x: dequantized(x, "e4m3r")
    bias = torch.randn(n, device=DEVICE).half()
    check_graphs(layer, apply, w, (512, 256, 64, 16, 8, 4, 2, 1), bias, near, x_of)


# --- whole models in vLLM's engine ------------------------------------------------------------------------------------------------

# The format of `nibble quantize`, the scheme, vLLM's type of activations, and how they are quantized.
SERVED = {
    "awq": ("awq", "u4zg128", "float16", "", "NibbleLinearKernel"),
    "gptq": ("gptq", "u4b8g128", "float16", "", "NibbleLinearKernel"),
    "compressed-tensors": ("compressed-tensors", "u4zg64", "float16", "", "NibbleLinearKernel"),
    "compiled": ("compressed-tensors", "u4b8g128", "float16", "", "NibbleLinearKernel"),
    "bfloat16": ("awq", "u4zg128", "bfloat16", "s8r" if nibble.doctor()["isa"] == "amx" and not GPU else "", "NibbleLinearKernel"),
    "int8": ("int-quantized", "s8r_s8c", "float16", "s8r", "NibbleInt8LinearKernel"),
    "fp8": ("float-quantized", "e4m3r_e4m3c", "float16", "e4m3r", "NibbleFp8LinearKernel"),
}  # fmt: skip
BLOCKS, PROMPT, NEW = 2, list(range(5, 60)), 3
ENGINE_OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 26}
if GPU:
    ENGINE_OPTIONS["gpu_memory_utilization"] = 0.1  # of several engines, one after the other in one process

ENGINE = """
import collections, json, sys
from vllm import LLM, SamplingParams
import nibble._torch.operators
import nibble.vllm
nibble.vllm.register()  # what vLLM does, where nibble is installed
calls = collections.Counter()
checked = nibble._torch.operators._checked
def counted(weight, n):
    calls[now] += 1
    return checked(weight, n)
nibble._torch.operators._checked = counted
prompt, new, models, options = json.loads(sys.argv[1])
out = {}
for now, (path, dtype) in models.items():
    llm = LLM(path, dtype=dtype, enforce_eager=now != "compiled", max_logprobs=-1, enable_prefix_caching=False, **options)
    model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
    holders = [h for layer in model.modules() for h in (layer, getattr(layer, "scheme", None), getattr(layer, "quant_method", None))]
    kernels = {type(getattr(h, name)).__name__ for h in holders for name in ("kernel", "fp8_linear") if getattr(h, name, None) is not None}
    calls[now] = 0
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False, prompt_logprobs=-1, logprobs=-1)
    [done] = llm.generate([{"prompt_token_ids": prompt}], params)
    tables = done.prompt_logprobs[1:] + done.outputs[0].logprobs
    out[now] = {"kernels": sorted(kernels), "calls": calls[now], "tokens": list(done.outputs[0].token_ids),
                "logprobs": [[table[i].logprob for i in range(len(table))] for table in tables]}
    del llm, model, holders
with open(sys.argv[2], "w") as file:
    json.dump(out, file)
"""


@pytest.fixture(scope="module")
def float_model(tmp_path_factory):
    tf = pytest.importorskip("transformers", minversion="5")
    platforms = pytest.importorskip("vllm.platforms", exc_type=ImportError)
    if not GPU and not platforms.vllm_version_matches_substr("cpu"):
        pytest.skip("this vLLM is not built for its CPU platform, and there is no GPU")
    torch.manual_seed(7)
    config = tf.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=BLOCKS, num_attention_heads=4, num_key_value_heads=2, vocab_size=512,
        max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=None,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.normal_(0, 0.05)
    directory = tmp_path_factory.mktemp("float")
    model.half().save_pretrained(directory)
    return directory


def run_engine(program, *args, **variables):
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    env.pop("NIBBLE_NUM_THREADS", None)
    done = subprocess.run([sys.executable, program, *map(str, args)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def served(float_model, tmp_path_factory):
    """By name what the engine said of each checkpoint, and the logits of the same numbers as f32 matrices; "float16" and "bfloat16 floats" are
    vLLM's own matrices of a dequantized checkpoint."""
    tf = pytest.importorskip("transformers", minversion="5")
    directory = tmp_path_factory.mktemp("served")
    models, references = {}, {}
    for name, (format, scheme, dtype, _, _) in SERVED.items():
        nibble.quantize_checkpoint(float_model, directory / name, scheme, format=format)
        nibble.dequantize_checkpoint(directory / name, directory / f"{name} floats", "f32")
        models[name] = str(directory / name), dtype
        references[name] = tf.AutoModelForCausalLM.from_pretrained(directory / f"{name} floats", dtype=torch.float32)
    for dtype in ("float16", "bfloat16"):
        models[f"{dtype} floats"], references[f"{dtype} floats"] = (str(directory / "awq floats"), dtype), references["awq"]
    program, out = directory / "engine.py", directory / "out.json"
    program.write_text(ENGINE)
    run_engine(program, json.dumps([PROMPT, NEW, models, ENGINE_OPTIONS]), out, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return json.loads(out.read_text()), references, directory


def served_logits(served, name, act_scheme):
    """The engine's, those of the float matrices, and theirs where layers get activations that are quantized and back. Less their means: the
    engine says logarithms of probabilities."""
    said, model = served[0][name], served[1][name]
    ids = torch.tensor([PROMPT + said["tokens"][:-1]])

    def round_activations(module, args):
        return dequantized(args[0].flatten(0, -2), act_scheme).unflatten(0, args[0].shape[:-1])

    with torch.no_grad():
        exact = model(ids).logits[0]
        hooks = [m.register_forward_pre_hook(round_activations) for key, m in model.named_modules() if act_scheme and key.endswith("_proj")]
        rounded = model(ids).logits[0]
    for hook in hooks:
        hook.remove()
    return [logits - logits.mean(-1, keepdim=True) for logits in (torch.tensor(said["logprobs"]), exact, rounded)]


@pytest.mark.parametrize("name", SERVED)
def test_a_whole_model(served, name):
    """Its logits are as far from exact ones as those of vLLM's own matrices in the same type, and where activations become codes as those of
    the reference, whose activations do. The two sets of codes are not the same: an input that differs by a part of a code takes another one."""
    _, _, dtype, act_scheme, kernel = SERVED[name]
    said, floats = served[0][name], f"{dtype} floats"
    assert said["kernels"] == [kernel] and served[0][floats]["calls"] == 0
    if not GPU or name != "compiled":  # a CUDA graph calls nothing
        assert said["calls"] == 4 * BLOCKS * NEW
    got, exact, rounded = served_logits(served, name, act_scheme)
    assert got.shape == (len(PROMPT) - 1 + NEW, 512)
    far = math.hypot(distance(*served_logits(served, floats, "")[:2]), distance(rounded, exact))
    assert far / 1.5 < distance(got, exact) < 1.25 * far < 0.15


WORKER = """
import json, os, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # workers import this file
    path, prompt, new, options = json.loads(sys.argv[1])
    llm = LLM(path, dtype="float16", enforce_eager=True, **options)
    [done] = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False))
    print("tokens", list(done.outputs[0].token_ids))
"""


def test_a_worker_of_its_own(served, tmp_path):
    """It finds nibble by its entry point, and its threads are bound to cores."""
    info = tmp_path / "nibble-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nibble\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnibble = nibble.vllm:register\n")
    (tmp_path / "worker.py").write_text(WORKER)
    places = [str(tmp_path), str(pathlib.Path(nibble.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    said = run_engine(tmp_path / "worker.py", json.dumps([str(served[2] / "awq"), PROMPT, NEW, ENGINE_OPTIONS]), PYTHONPATH=os.pathsep.join(places))
    assert "Using NibbleLinearKernel for AutoAWQ" in said and f"tokens {served[0]['awq']['tokens']}" in said
