"""Streams, and the GPU where there is one. Without it, what is asked of arrays that say they are on one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from conftest import act_ordered, distance

import nibble
from nibble import _arrays


class OnGpu:
    """An array that says it is on GPU 0, and notes which stream it was asked for."""

    shape, dtype = (3, 256), np.dtype("float32")

    def __init__(self, versions=True):
        self.versions, self.streams = versions, []

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, *, stream=None, **more):
        if more and not self.versions:
            raise TypeError("max_version")
        self.streams.append(stream)
        return np.ones(self.shape, self.dtype).__dlpack__()


def test_the_stream_reaches_the_producer():
    for versions in (True, False):
        x = OnGpu(versions)
        _arrays.export(x, 0)
        _arrays.export(x, 0x1234)
        assert x.streams == [1, 0x1234]  # 1: DLPack's name of the default stream
    assert _arrays.stream_handle(7) == 7
    assert _arrays.stream_handle(type("TorchStream", (), {"cuda_stream": 8})()) == 8
    assert _arrays.stream_handle(type("CupyStream", (), {"ptr": 9})()) == 9


def test_the_wrong_device(rng):
    w = nibble.pack(act_ordered(rng))
    with pytest.raises(nibble.InvalidArgument, match="cuda:0.*cpu:0"):
        w.linear(OnGpu())
    with pytest.raises(nibble.InvalidArgument, match="cuda"):
        w.dequantize(out=OnGpu())


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    report = nibble.doctor()
    if not torch.cuda.is_available() or report["gpu"] is None:
        pytest.skip(report.get("gpu_reason", "PyTorch without CUDA"))
    torch.manual_seed(0)
    return torch


@pytest.mark.parametrize("scheme", ["u4b8g128", "u4zg128", "u8b128g128"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_linear(torch, rng, scheme, dtype):
    dtype = getattr(torch, dtype)
    q = nibble.quantize(rng.standard_normal((512, 1024), dtype=np.float32), scheme)
    w = nibble.pack(q, backend="cuda")
    assert w.backend == "cuda" and w.unpack() == q
    matrix = w.dequantize(out=torch.empty(512, 1024, device="cuda"))
    assert np.array_equal(matrix.cpu().numpy(), nibble.pack(q).dequantize())
    bias = torch.randn(512, device="cuda")
    for m in (1, 16, 300):
        x = torch.randn(m, 1024, device="cuda", dtype=dtype)
        y = w.linear(x, bias=bias)
        assert y.is_cuda and y.dtype == dtype
        assert distance(y.float().cpu(), (x.float() @ matrix.T + bias).cpu()) < 1e-2
        out = torch.empty_like(y)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        w.linear(x, bias=bias, out=out, stream=stream)
        stream.synchronize()
        assert torch.equal(out, y)
        with torch.cuda.stream(stream):
            again = w.linear(x, bias=bias)
        stream.synchronize()
        assert torch.equal(again, y)
    with pytest.raises(nibble.InvalidArgument, match="cpu"):
        w.linear(torch.randn(1, 1024))
    with pytest.raises(nibble.InvalidArgument, match="bias"):
        w.linear(x, bias=torch.randn(512))


@pytest.mark.parametrize("groups", [1, 4])
def test_conv(torch, rng, groups):
    q = nibble.quantize_conv(rng.standard_normal((96, 64 // groups, 3, 3), dtype=np.float32), "u4b8c")
    here, there = nibble.pack(q), nibble.pack(q, backend="cuda")
    assert there.filter == (3, 3) and there.unpack() == q
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 64, 12, 14).half().to(memory_format=memory_format)
        options = {"stride": 2, "padding": (1, 1, 0, 2), "groups": groups, "activation": "relu", "out_dtype": "f32"}
        y = there.conv(x.cuda(), **options)
        assert y.is_cuda and y.is_contiguous(memory_format=memory_format)
        assert distance(y.cpu(), here.conv(x, **options)) < 5e-3


@pytest.mark.parametrize("scheme", ["s8r", "s8zr", "s8zg128", "e4m3r", "e4m3g128"])
def test_codes_are_those_of_the_cpu(torch, scheme):
    x = torch.randn(7, 1024)
    for here, there in zip(nibble.quantize_activations(x, scheme), nibble.quantize_activations(x.cuda(), scheme)):
        assert (here is None) == (there is None)
        if here is not None:
            assert torch.equal(here.view(torch.uint8), there.cpu().view(torch.uint8))


def test_graph(torch, rng):
    w = nibble.pack(nibble.quantize(rng.standard_normal((512, 1024), dtype=np.float32)), backend="cuda")
    x, out = torch.randn(4, 1024, device="cuda").half(), torch.empty(4, 512, device="cuda").half()
    w.linear(x, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w.linear(x, out=out)
    x.mul_(2)
    graph.replay()
    assert torch.equal(out, w.linear(x))


def test_graph_of_a_module(torch, rng):
    """Results and workspaces come from the graph's pool, and every layer runs on the stream that is captured."""
    import nibble.torch as nt

    quantized = (nibble.quantize(rng.standard_normal((1024, 1024), dtype=np.float32)) for _ in range(3))
    model = torch.nn.Sequential(*(nt.QuantLinear(q, activation="relu", device="cuda") for q in quantized))
    for m in (1, 64, 300):
        x = torch.randn(m, 1024, device="cuda").half()
        with torch.no_grad():
            model(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = model(x)
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, model(x))


def test_the_gpu_of_the_tensors(torch, rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    import nibble.torch as nt

    q = nibble.quantize(rng.standard_normal((512, 1024), dtype=np.float32))
    x = torch.randn(4, 1024).half()
    there = nt.QuantLinear(q, device="cuda:1")
    y = there(x.to("cuda:1"))
    assert y.get_device() == 1 and torch.cuda.current_device() == 0
    assert torch.equal(y.cpu(), nt.QuantLinear(q, device="cuda:0")(x.to("cuda:0")).cpu())
    with pytest.raises(nibble.InvalidArgument, match="cuda:0, the weight on cuda:1"):
        there.weight.linear(x.to("cuda:0"))
    with pytest.raises(nibble.InvalidArgument, match="bias is on GPU 0"):
        there.weight.linear(x.to("cuda:1"), bias=torch.zeros(512, device="cuda:0"))


def test_module_moves(torch, rng):
    import nibble.torch as nt

    layer = nt.QuantLinear(act_ordered(rng))
    x = torch.randn(3, 256).half()
    here = layer(x)
    layer.cuda()
    assert layer.weight.backend == "cuda" and distance(layer(x.cuda()).cpu().float(), here.float()) < 2e-3
    layer.cpu()
    assert torch.equal(layer(x), here)


def test_awq_without_packing(torch):
    from nibble.compat import vllm

    qweight = torch.randint(-(2**31), 2**31 - 1, (256, 8), dtype=torch.int32)
    scales, zeros = torch.rand(2, 64).half(), torch.randint(-(2**31), 2**31 - 1, (2, 8), dtype=torch.int32)
    here = vllm.awq_dequantize(qweight, scales, zeros, 0, 0, 0)
    assert torch.equal(vllm.awq_dequantize(qweight.cuda(), scales.cuda(), zeros.cuda(), 0, 0, 0).cpu(), here)


def test_a_weight_as_a_tensor(torch, rng):
    import nibble.torch as nt

    q = nibble.quantize(rng.standard_normal((128, 256), dtype=np.float32), "u4zg128")
    on_cpu, on_gpu = nt.QuantLinear(q), nt.QuantLinear(q, device="cuda")
    x = torch.randn(3, 256, device="cuda", dtype=torch.float16)
    wanted = on_gpu(x)
    assert on_gpu.packed.is_cuda and torch.equal(torch.ops.nibble.linear(x, on_gpu.packed, 128), wanted)
    assert nt.from_tensor(on_gpu.packed.clone()).unpack() == q
    for source in (on_cpu.state_dict(), on_gpu.state_dict(), {"packed": on_gpu.packed.cpu()}):  # its bytes are for there, or packed anew
        there, here = nt.QuantLinear(q, device="cuda"), nt.QuantLinear(q)
        there.load_state_dict(source)
        here.load_state_dict(source)
        assert torch.equal(there(x), wanted) and torch.equal(here.packed, on_cpu.packed)
    moved = nt.QuantLinear(q).to("cuda")
    assert torch.equal(moved(x), wanted) and torch.equal(moved.to("cpu").packed, on_cpu.packed)


@pytest.mark.parametrize("scheme", ["u4b8g128", "u4zg128", "s8r_s8c", "e4m3r_e4m3c", "s8r_u4b8g128"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fused_linear(torch, rng, scheme, dtype):
    """As the layers of its parts on the same GPU, with the norm, the product and the addition rounded between them."""
    import nibble.torch as nt

    dtype = getattr(torch, dtype)
    act_scheme, weights = nibble._torch.layers._parts(scheme)
    two = {name: nibble.quantize(rng.standard_normal((512, 1024), dtype=np.float32) / 32, weights) for name in ("gate", "up")}
    norm = torch.nn.RMSNorm(1024, eps=1e-5, device="cuda", dtype=dtype).requires_grad_(False)
    norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    options = dict(act_scheme=act_scheme, device="cuda", dtype=dtype)
    gate, up = (nt.QuantLinear(q, **options) for q in two.values())
    joined = nt.FusedLinear(two, norm=norm, **options)
    glu = nt.FusedLinear(two, norm=norm, glu=True, activation="silu", **options)
    assert glu.split() == two
    # A rounding of each of three results, and codes of activations that become their neighbours where a norm is rounded otherwise.
    bound = 4 * torch.finfo(dtype).eps + {"": 0, "s8": 2.0**-7, "e4": 2.0**-4}[act_scheme[:2]]
    for m in (1, 16, 300):
        x, residual = torch.randn(m, 1024, device="cuda", dtype=dtype), torch.randn(m, 512, device="cuda", dtype=dtype)
        first, second = gate(norm(x)), up(norm(x))
        y = joined(x)
        assert y.dtype == dtype and distance(y.float().cpu(), torch.cat([first, second], -1).float().cpu()) < bound
        z = glu(x, residual)
        wanted = torch.nn.functional.silu(first.float()) * second.float() + residual.float()
        assert z.dtype == dtype and distance(z.float().cpu(), wanted.cpu()) < 2 * bound
        args = (x, glu.packed, 512, "silu", True, residual, norm.weight, 1e-5, 0.0)
        assert torch.equal(torch.ops.nibble.fused_linear(*args), z)
    here = nt.FusedLinear(two, norm=copy.deepcopy(norm).cpu(), glu=True, activation="silu", **{**options, "device": "cpu"})
    x = torch.randn(3, 1024, device="cuda", dtype=dtype)
    moved = here.to("cuda")
    assert moved.packed.is_cuda and torch.equal(moved(x), glu(x))
    x.requires_grad_()
    glu(x).sum().backward()
    assert x.grad.dtype == dtype and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma"])
def test_a_fused_model(torch, kind):
    """Eagerly, in a graph, and compiled."""
    import nibble.torch as nt

    tf = pytest.importorskip("transformers", minversion="5")
    config = getattr(tf, f"{kind}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=512,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    plain = getattr(tf, f"{kind}ForCausalLM")(config).eval().half().cuda()
    nt.convert(plain, "u4b8g128")
    model = copy.deepcopy(plain)
    assert len(nt.fuse(model)) == 8
    ids = torch.randint(2, 512, (2, 11), device="cuda")
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        # Half of the roundings of two layers, each of 2^-11, which norms and the softmax amplify by far less than 10.
        assert distance(logits.float().cpu(), plain(input_ids=ids, use_cache=False).logits.float().cpu()) < 2 * 8 * 10 * 2.0**-11
        torch.compiler.reset()
        compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        assert distance(compiled(input_ids=ids, use_cache=False).logits.float().cpu(), logits.float().cpu()) < 1e-3
        graph, x = torch.cuda.CUDAGraph(), torch.randn(1, 1, 256, device="cuda").half()
        block = model.model.layers[0]
        angles = model.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long, device="cuda"))
        block(x, position_embeddings=angles, attention_mask=None)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = block(x, position_embeddings=angles, attention_mask=None)
        x.normal_()
        graph.replay()
        assert torch.equal(y, block(x, position_embeddings=angles, attention_mask=None))
    text = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert text.shape == (2, 19)
    there = logits.float().cpu()
    assert distance(model.cpu()(input_ids=ids.cpu(), use_cache=False).logits.float().detach(), there) < 2 * 8 * 10 * 2.0**-11


def vllm_layers(torch, device):
    """Packed weights [K,K] of each kind that vLLM's layers have, by the functions that read their tensors, with the W that they are."""
    from nibble.vllm import _weights

    k, group = 512, 128
    words = torch.randint(-(2**31), 2**31 - 1, (k, k // 8), dtype=torch.int32)
    scales, zeros = torch.rand(k, k // group).half() * 0.01, torch.randint(-(2**31), 2**31 - 1, (k // 8, k // group), dtype=torch.int32)
    order = (torch.arange(k) // group)[torch.randperm(k)].int()
    int8, fp8 = torch.randint(-128, 128, (k, k), dtype=torch.int8), torch.randn(k, k).to(torch.float8_e4m3fn)
    channels, static = torch.rand(k, 1) * 0.001, (torch.tensor([0.03]), torch.tensor([-7]))
    parts = [
        *((_weights.grouped(words, scales, z, g, n=k, k=k, bits=4, group_size=group), "") for z in (None, zeros) for g in (None, order)),
        (_weights.codes(int8, channels), "s8r"), (_weights.codes(int8, channels), "s8zr"), (_weights.codes(int8, channels, static=static), "s8zt"),
        (_weights.codes(fp8, channels), "e4m3r"), (_weights.codes(fp8, torch.tensor(0.001), static=(torch.tensor(0.02), None)), "e4m3t"),
        (_weights.blocks(fp8, torch.rand(4, 4) * 0.001, (128, 128)), "e4m3g128"),
    ]  # fmt: skip
    dtype = torch.float16
    return [(_weights.pack(q, device, dtype, act), torch.from_numpy(nibble.pack(q).dequantize()), q.scheme, act) for q, act in parts]


def test_layers_of_vllm_in_a_graph(torch):
    """As the engine runs them: once without a graph for each number of tokens, the largest first, and then captured into the layer's pool.
    Compiled they give the same; where a capture begins, torch.compile would compile anew."""
    import nibble.torch  # noqa: F401
    from nibble.vllm import _weights

    layers = vllm_layers(torch, torch.device("cuda"))
    bias = torch.randn(512, device="cuda").half()
    for packed, w, scheme, act in layers:
        assert packed.is_cuda and _weights.refusal(scheme, 512, torch.float16, act) == ""
        torch._dynamo.reset()  # each layer is another graph

        def run(x, packed=packed):
            return torch.ops.nibble.linear(x, packed, 512, bias, "none", None)

        compiled, captured = torch.compile(run, backend="eager", fullgraph=True), []
        pool = torch.cuda.graph_pool_handle()  # lives as long as a graph of it
        with torch.inference_mode():
            for m in (512, 64, 8, 1):
                x = torch.randn(m, 512, device="cuda").half()
                run(x)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    y = run(x)
                captured.append((graph, x, y))
            for graph, x, y in captured:
                x.copy_(torch.randn_like(x))
                graph.replay()
                assert torch.equal(y, run(x)) and torch.equal(y, compiled(x)), (scheme, act, x.shape)
                assert distance(y.float().cpu(), x.float().cpu() @ w.T + bias.float().cpu()) < (0.05 if act else 5e-3), (scheme, act, x.shape)


def test_vllm_chooses_and_captures(torch):
    pytest.importorskip("vllm", exc_type=ImportError)
    import nibble.vllm

    nibble.vllm.register()
    from vllm.model_executor.layers.quantization.utils import quant_utils

    from nibble.vllm import _kernels

    k, keys = 512, (quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticChannelSym)
    kernel = _kernels.linear.init_fp8_linear_kernel(*keys, weight_shape=(k, k), input_dtype=torch.float16, out_dtype=torch.float16)
    assert type(kernel) is _kernels.NibbleFp8LinearKernel
    layer, weight, scale = torch.nn.Module(), torch.randn(k, k).to(torch.float8_e4m3fn), torch.rand(k, 1) * 0.001
    layer.weight, layer.weight_scale = (torch.nn.Parameter(t.cuda(), requires_grad=False) for t in (weight.t(), scale))
    kernel.process_weights_after_loading(layer)
    x = torch.randn(8, k, device="cuda").half()
    with torch.inference_mode():
        kernel.apply_weights(layer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernel.apply_weights(layer, x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, kernel.apply_weights(layer, x))
    assert distance(y.float().cpu(), x.float().cpu() @ (weight.float() * scale).T) < 0.05


def experts_on(backend, scheme, dtype, experts=6, hidden=256, inner=128):
    rng = np.random.default_rng(3)
    act, _, weight = scheme.rpartition("_")
    qs = [[nibble.quantize(rng.standard_normal((n, k)).astype("float32") / k**0.5, weight) for _ in range(experts)]
          for n, k in ((2 * inner, hidden), (hidden, inner))]  # fmt: skip
    spec = {"backend": backend, "a_dtype": dtype, "act_scheme": act, "m_max": 1024}
    return nibble.pack_experts(qs[0], glu=True, **spec), nibble.pack_experts(qs[1], **spec)


@pytest.mark.parametrize("scheme", ["u4b8g128", "u4zg128", "u4og64", "s8c", "e4m3c", "s8r_s8c", "e4m3r_e4m3c", "e4m3g128_e4m3b128x128", "s8r_u4b8g128"])
def test_experts(torch, scheme):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    for tokens in (1, 7, 40, 900):  # of 900 many CTAs sort the pairs, and a glu is a step of its own
        x = torch.randn(tokens, 256, dtype=torch.bfloat16)
        ids = torch.stack([torch.randperm(6)[:3] for _ in range(tokens)]).to(torch.int32)
        ids[0, 1] = -1
        weights = torch.rand(tokens, 3)
        wanted = nibble.moe(x, ids, weights, *experts_on("cpu", scheme, "bf16"))
        y = nibble.moe(x.cuda(), ids.cuda(), weights.cuda(), *experts_on("cuda", scheme, "bf16"))
        assert y.is_cuda and distance(y.float().cpu().numpy(), wanted.float().numpy()) < 0.03


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_route(torch, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    rules = [
        (8, {"top_k": 2}),
        (128, {"top_k": 8, "normalize": False}),
        (256, {"top_k": 8, "score": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5, "bias": torch.rand(256)}),
    ]
    for experts, rule in rules:
        logits = torch.randn(3, 67, experts).to(getattr(torch, dtype))
        ids, weights = nibble.route(logits, **rule)
        there = {key: value.cuda() if key == "bias" else value for key, value in rule.items()}
        ids_there, weights_there = nibble.route(logits.cuda(), **there)
        assert ids_there.is_cuda and ids_there.shape == (3, 67, rule["top_k"])
        # Two sigmoids that differ by less than a GPU's exponential is off may change places.
        assert (ids_there.cpu() == ids).float().mean() > 0.999
        assert torch.allclose(weights_there.cpu(), weights, rtol=1e-5)
    with pytest.raises(nibble.InvalidArgument, match="bias"):
        nibble.route(torch.randn(4, 8).cuda(), 2, bias=torch.rand(8))
    with pytest.raises(nibble.Unsupported, match="1025 experts"):
        nibble.route(torch.randn(4, 1025).cuda(), 2)


def test_a_captured_layer_of_experts_serves_every_routing(torch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    gate_up, down = experts_on("cuda", "u4b8g128", "bf16")
    x, weights = torch.randn(40, 256, dtype=torch.bfloat16, device="cuda"), torch.rand(40, 2, device="cuda")
    ids = torch.zeros(40, 2, dtype=torch.int32, device="cuda")
    ids[:, 1] = 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        nibble.moe(x, ids, weights, gate_up, down)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = nibble.moe(x, ids, weights, gate_up, down)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(40)]))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, nibble.moe(x, ids, weights, gate_up, down))
        # A token's bits do not depend on the others: all kernels of 40 tokens multiply a row alike.
        alone = nibble.moe(x[5:6].expand(40, -1).contiguous(), ids[5:6].expand(40, -1).contiguous(), weights[5:6].expand(40, -1).contiguous(),
                           gate_up, down)  # fmt: skip
        assert torch.equal(alone[0], y[5])


def test_a_layer_without_rows_waits_for_what_came_before(torch):
    """Two layers in a graph, whose memory is the same: the first one's products have nothing to do, the second one's read what a copy before it writes."""
    g = torch.Generator().manual_seed(12)
    gate_up, down = experts_on("cuda", "u4b8g128", "bf16")
    x, source = torch.zeros(4, 256, dtype=torch.bfloat16).cuda(), torch.randn(4, 256, generator=g).bfloat16().cuda()
    weights = torch.rand(4, 2, generator=g).cuda()
    none, ids = torch.full((4, 2), -1, dtype=torch.int32).cuda(), torch.tensor([[0, 1], [5, 2], [1, 0], [3, 4]], dtype=torch.int32).cuda()
    wanted = nibble.moe(source, ids, weights, gate_up, down)

    def layers():
        x.copy_(source)
        nibble.moe(x, none, weights, gate_up, down)
        y = nibble.moe(x, ids, weights, gate_up, down)
        x.zero_()
        return y

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layers()
    for _ in range(20):
        graph.replay()
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("scheme", ["u4b8g128", "s8r_s8c", "e4m3g128_e4m3b128x128"])
def test_grouped(torch, scheme):
    """Sorted, gathered and padded rows against the CPU; a captured call serves every offsets."""
    torch.manual_seed(1)
    host, _ = experts_on("cpu", scheme, "bf16")
    gpu, _ = experts_on("cuda", scheme, "bf16")
    counts = torch.tensor([3, 0, 40, 1, 4, 16], dtype=torch.int32)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    rows, most = int(offsets[-1]), 40
    x = torch.randn(rows, 256, dtype=torch.bfloat16)
    y = nibble.grouped(x.cuda(), gpu, offsets=offsets.cuda(), activation="silu")
    wanted = nibble.grouped(x, host, offsets=offsets, activation="silu")
    assert distance(y.float().cpu(), wanted.float()) < 1e-2
    tokens, places = x[:4], torch.randint(4, (rows,), dtype=torch.int32)
    y = nibble.grouped(tokens.cuda(), gpu, offsets=offsets.cuda(), rows=places.cuda(), activation="silu")
    assert distance(y.float().cpu(), nibble.grouped(tokens[places], host, offsets=offsets, activation="silu").float()) < 1e-2
    apart, out = torch.full((6, most, 256), torch.nan, dtype=torch.bfloat16), torch.full((6, most, 128), 7.0, dtype=torch.bfloat16)
    for e in range(6):
        apart[e, : counts[e]] = x[offsets[e] : offsets[e + 1]]
    out = nibble.grouped(apart.cuda(), gpu, counts=counts.cuda(), activation="silu", out=out.cuda()).cpu()
    assert distance(torch.cat([out[e, :count] for e, count in enumerate(counts)]).float(), wanted.float()) < 1e-2
    assert all(torch.all(out[e, count:] == 7) for e, count in enumerate(counts))

    given, d = offsets.cuda(), torch.empty_like(wanted, device="cuda")
    stream, graph, a = torch.cuda.Stream(), torch.cuda.CUDAGraph(), x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        nibble.grouped(a, gpu, offsets=given, activation="silu", out=d)
    other = torch.tensor([0, 10, 20, 20, 20, 63, 64], dtype=torch.int32)
    for each in (offsets, other):
        given.copy_(each)
        graph.replay()
        torch.cuda.synchronize()
        assert distance(d.float().cpu(), nibble.grouped(x, host, offsets=each, activation="silu").float()) < 1e-2


@pytest.mark.parametrize("act, scheme", [("s8r", "s8c"), ("e4m3g128", "e4m3b128x128")])
def test_grouped_codes(torch, act, scheme):
    """Codes with a scale for each row or group, sorted and padded."""
    host, _ = experts_on("cpu", f"{act}_{scheme}", "bf16")
    gpu, _ = experts_on("cuda", f"{act}_{scheme}", "bf16")
    counts = torch.tensor([3, 0, 40, 1, 4, 16], dtype=torch.int32)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
    codes, scales, _ = nibble.quantize_activations(torch.randn(int(offsets[-1]), 256, dtype=torch.bfloat16), act)
    wanted = nibble.grouped(codes, host, offsets=offsets, a_scale=scales, activation="silu", out_dtype="bf16")
    y = nibble.grouped(codes.cuda(), gpu, offsets=offsets.cuda(), a_scale=scales.cuda(), activation="silu", out_dtype="bf16")
    assert distance(y.float().cpu(), wanted.float()) < 5e-3
    apart, of_all = codes.new_zeros(6, 40, 256), scales.new_zeros(6, 40, *scales.shape[1:])
    for e in range(6):
        apart[e, : counts[e]], of_all[e, : counts[e]] = codes[offsets[e] : offsets[e + 1]], scales[offsets[e] : offsets[e + 1]]
    y = nibble.grouped(apart.cuda(), gpu, counts=counts.cuda(), a_scale=of_all.cuda(), activation="silu", out_dtype="bf16").cpu()
    assert distance(torch.cat([y[e, :count] for e, count in enumerate(counts)]).float(), wanted.float()) < 5e-3


def test_experts_move(torch):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    import nibble.torch as nt

    gate_up, down = experts_on("cpu", "u4zg128", "f32")
    layer = nt.QuantExperts(gate_up, down)
    x, ids = torch.randn(5, 256), torch.tensor([[0, 1], [2, 3], [4, 5], [0, 5], [3, 1]])
    weights = torch.rand(5, 2)
    wanted = layer(x, ids, weights)
    layer.to("cuda")
    y = layer(x.cuda(), ids.cuda(), weights.cuda())
    assert distance(y.cpu().numpy(), wanted.numpy()) < 1e-3
    assert distance(layer.to("cpu")(x, ids, weights).numpy(), wanted.numpy()) < 1e-5
