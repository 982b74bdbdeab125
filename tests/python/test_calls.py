"""How a call finds its arrays and its plan: DLPack's table of C functions, what is left without it, and who sees the operators."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import numpy as np
import pytest
from conftest import act_ordered, distance

import nibble

ROWS = 3
CURRENT, OTHER = 0x1000, 0x2000  # streams


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]  # fmt: skip


OPEN = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))
STREAM = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))


class Table(ctypes.Structure):
    pass


Table._fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.POINTER(Table)),
                  ("owning", ctypes.c_void_p * 3), ("open", OPEN), ("stream", STREAM)]  # fmt: skip


def foreign(major=1, older=None, opens=True, device=1):
    """A framework with the table: a class of its arrays."""

    class Array:
        opened = 0

        def __init__(self, values):
            self.values = values  # two dense dimensions of f32, behind a first element that is not theirs
            self.memory = np.concatenate([[np.nan], values.ravel()]).astype(np.float32)
            self.sizes = (ctypes.c_int64 * 2)(*values.shape)

        def __dlpack_device__(self):
            return device, 0

        def __dlpack__(self, *, stream=None, **more):
            if opens and stream != OTHER:
                raise AssertionError("not by the table")
            asked.append(("capsule", stream))
            return self.values.__dlpack__()

    def open_(array, out):
        type(array).opened += 1
        if not opens:
            return -1
        t = out.contents
        t.data, t.byte_offset, t.device_type, t.device_id = array.memory.ctypes.data, 4, device, 0
        t.ndim, t.code, t.bits, t.lanes, t.shape, t.strides = 2, 2, 32, 1, array.sizes, None  # no strides: dense
        return 0

    def stream(device_type, device, out):
        asked.append(("stream", device_type, device))
        out[0] = CURRENT
        return 0

    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = Table(major, 0, older, (ctypes.c_void_p * 3)(), OPEN(open_), STREAM(stream))
    asked = Array.asked = []
    Array.keep, Array.table = (table, b"dlpack_exchange_api"), table
    Array.__dlpack_c_exchange_api__ = new(ctypes.addressof(table), Array.keep[1], None)
    return Array


@pytest.fixture
def weight(rng):
    return nibble.pack(act_ordered(rng))


@pytest.fixture
def x(rng):
    return rng.standard_normal((ROWS, 256), dtype=np.float32)


def test_arrays_are_opened_by_the_table(weight, x):
    for kind in (foreign(), foreign(major=2, older=ctypes.pointer(foreign().table))):
        assert np.array_equal(weight.linear(kind(x), activation="relu"), weight.linear(x, activation="relu"))
        assert np.array_equal(weight.linear(x, gate=kind(np.full((ROWS, 32), 2.0))), weight.linear(x) * 2)


def test_tables_of_no_use(weight, x):
    exact = weight.linear(x)
    kind = foreign(opens=False)
    assert np.array_equal(weight.linear(kind(x)), exact) and kind.opened > 0
    with pytest.raises(nibble.InvalidArgument, match="x is on cuda:0, the weight on cpu:0"):
        weight.linear(foreign(device=2)(x))

    class Derived(foreign()):  # a table is for the very type that shows it
        def __dlpack__(self, **more):
            return self.values.__dlpack__()

    assert np.array_equal(weight.linear(Derived(x)), exact) and Derived.opened == 0


def test_arrays_are_ready_for_the_stream(x):
    """On the framework's current stream nothing waits; for another, every array is asked for with it."""
    kind = foreign(device=2)
    a, codes, scales = kind(x), kind(x), kind(x)
    for stream in (None, CURRENT):
        kind.asked.clear()
        with pytest.raises(nibble.InvalidArgument, match="codes must be s8"):  # after all are open, before any runs
            nibble.quantize_activations(a, "s8r", codes=codes, scales=scales, stream=stream)
        assert kind.asked == [("stream", 2, 0)]
    kind.asked.clear()
    with pytest.raises(nibble.Error):
        nibble.quantize_activations(a, "s8r", codes=codes, scales=scales, stream=OTHER)
    assert kind.asked[:2] == [("stream", 2, 0), ("capsule", OTHER)]


def test_plans_are_kept(weight, x):
    def plans_of(call):
        before = weight._weight.plans
        call()
        return weight._weight.plans - before

    many = np.ones((5, 256), np.float32)
    assert plans_of(lambda: weight.linear(x)) == 1
    for call in (lambda: weight.linear(many[:4]), lambda: weight.linear(x.reshape(1, ROWS, 256), out=np.empty((1, ROWS, 32), np.float32)),
                 lambda: weight.linear(x, bias=True, clamp=(1, 2), out_scale=2), lambda: weight.linear(x, out_dtype="f32", act_scheme="")):  # fmt: skip
        assert plans_of(call) == 0
    for call in (lambda: weight.linear(many), lambda: weight.linear(x, activation="clamp"), lambda: weight.linear(x, activation="clamp", clamp=(1, 2)),
                 lambda: weight.linear(x, bias=False), lambda: weight.linear(x, out_dtype="f16"), lambda: weight.linear(x, act_scheme="s8r"),
                 lambda: weight.linear(x.astype(np.float16)), lambda: weight.linear(x, allow_reference=False),
                 lambda: weight.linear(x, kernel=weight.explain("f32", ROWS)[-1].steps[-1]), weight.dequantize):  # fmt: skip
        assert plans_of(call) == 1
        assert plans_of(call) == 0


def test_workspace(weight):
    assert 0 < weight.workspace_bytes(1) < weight.workspace_bytes(100) == weight.workspace_bytes(100, "f32", act_scheme="", out_dtype="f32")
    for m in (0, -1, 2**30 + 1):
        with pytest.raises(nibble.InvalidArgument, match=f"m is {m}"):
            weight.workspace_bytes(m)


def test_plans_are_shared(weight, x):
    def asked(call):
        before = plans.hits, plans.misses
        np.testing.assert_array_equal(call(plans), call(None))
        return plans.hits - before[0], plans.misses - before[1]

    plans = nibble.PlanCache(2)
    other = nibble.pack(weight.unpack())
    assert asked(lambda plans: weight.linear(x, plans=plans)) == (0, 1)
    kept = other._weight.plans
    assert asked(lambda plans: other.linear(x, plans=plans)) == (1, 0)
    assert other._weight.plans == kept + 1, "without a cache the weight keeps it"
    assert asked(lambda plans: other.linear(x[:1], plans=plans)) == (1, 0), "a plan for more tokens"
    assert asked(lambda plans: other.linear(x, activation="silu", plans=plans)) == (0, 1)
    assert asked(lambda plans: other.linear(x, activation="relu", plans=plans)) == (0, 1)
    assert len(plans) == 2 and repr(plans).startswith("PlanCache(2 plans, ")
    with pytest.raises(nibble.InvalidArgument):
        weight.linear(x[..., :-1], plans=plans)
    with pytest.raises(nibble.NotFound):
        weight.linear(x, kernel="nope", plans=plans)
    plans.clear()
    assert len(plans) == 0
    images = nibble.quantize_conv(np.ones((8, 4, 3, 3), np.float32), "u4b8c")
    filters, twin = nibble.pack(images), nibble.pack(images)
    image = np.ones((1, 4, 5, 5), np.float32)
    assert asked(lambda plans: filters.conv(image, plans=plans)) == (0, 1)
    assert asked(lambda plans: twin.conv(image, plans=plans)) == (1, 0)


def test_zero_points_in_groups(rng):
    w = nibble.pack(nibble.quantize(rng.standard_normal((32, 256), dtype=np.float32), "u4b8g64"))
    x = rng.standard_normal((2, ROWS, 256), dtype=np.float32) + 1
    codes, scales, zeros = nibble.quantize_activations(x, "s8zg64")
    assert codes.shape == x.shape and scales.shape == zeros.shape == (2, ROWS, 4) and zeros.dtype == np.int32
    values = (codes.reshape(2, ROWS, 4, 64) - zeros[..., None].astype(np.float64)) * scales[..., None]
    assert distance(values.reshape(x.shape), x) < 0.01
    assert distance(w.linear(codes, a_scale=scales, a_zero=zeros), values.reshape(x.shape) @ w.dequantize().T) < 1e-6


# --- PyTorch ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    module.manual_seed(0)
    return module


@pytest.fixture
def layer(torch, weight):
    import nibble.torch

    return nibble.torch.QuantLinear(weight)


def test_tensors_need_no_capsule(torch, layer, monkeypatch):
    """Where PyTorch has the table, nothing asks a tensor for __dlpack__."""
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("an older PyTorch")
    monkeypatch.setattr(torch.Tensor, "__dlpack__", lambda *_, **__: pytest.fail("a capsule"))
    import nibble.torch

    conv = nibble.torch.QuantConv2d.from_float(torch.nn.Conv2d(8, 8, 3), "u8b128c")
    packed, x, bias = layer.packed, torch.randn(3, 256), torch.nn.Parameter(torch.randn(32))
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(torch.ops.nibble.linear(x, packed, 32), y)
        assert torch.equal(layer(torch.nn.Parameter(x)), y)
        behind = torch.cat([x, x])[2:4]  # an offset
        assert torch.equal(layer(behind), layer(behind.clone()))
        assert torch.equal(layer.weight.linear(x, bias=bias), layer.weight.linear(x, bias=bias.numpy()))
        codes, scales, _ = nibble.torch.quantize_activations(x, "s8r")
        assert distance(torch.ops.nibble.scaled_linear(codes, scales, None, packed, 32).float(), y) < 0.02
        assert conv(torch.randn(1, 8, 5, 5)).shape == (1, 8, 3, 3)
        layer.dequantize()


def test_without_the_table(torch):
    """As with an older PyTorch."""
    program = """if True:
        import numpy as np, torch, nibble.torch
        from nibble import _arrays
        _arrays.Torch.table = lambda self, kind: None
        asked, ask = [], torch.Tensor.__dlpack__
        torch.Tensor.__dlpack__ = lambda self, *more, **named: asked.append(self) or ask(self, *more, **named)
        rng = np.random.default_rng(0)
        layer = nibble.torch.QuantLinear(nibble.quantize(rng.standard_normal((32, 256), dtype=np.float32)))
        x, bias, out = torch.randn(3, 256), torch.nn.Parameter(torch.randn(32)), torch.empty(3, 32)
        y = layer(x)
        assert asked and np.array_equal(y.numpy(), layer.weight.linear(x.numpy()))
        assert layer.weight.linear(x, bias=bias, out=out) is out
        assert np.array_equal(out.numpy(), layer.weight.linear(x.numpy(), bias=bias.detach().numpy()))
        x.requires_grad_()
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    "change, error, words",
    [
        (lambda x: x.to("meta"), nibble.Unsupported, "meta"),
        (lambda x: x.double(), nibble.Error, r"float64.*x\.float\(\)"),
        (lambda x: x[:, :128], nibble.InvalidArgument, r"\[3, 128\].*takes \[..., 256\]"),
        (lambda x: x.expand(1, 1, 1, 3, 256), nibble.InvalidArgument, "5 dimensions"),
        (lambda x: x[0, 0], nibble.InvalidArgument, r"\[\]"),
        (lambda x: x.to_sparse(), TypeError, "x is a Tensor"),
        (lambda x: x.tolist(), TypeError, "x is a list"),
        (lambda x: x.cfloat(), nibble.InvalidArgument, "complex64"),
    ],
)
def test_tensors_that_do_not_fit(torch, weight, change, error, words):
    with pytest.raises(error, match=words):
        weight.linear(change(torch.ones(3, 256)))


def test_tracers_see_the_operator(torch, layer):
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, x, op = [], torch.randn(3, 256), torch.ops.nibble.linear.default
    with Log():
        layer(x)
    assert op in seen
    graph = make_fx(layer)(x)
    assert op in [node.target for node in graph.graph.nodes]
    assert torch.equal(graph(x * 2), layer(x * 2))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the layer's own
        assert layer(mode.from_tensor(x)).shape == (3, 32)
    exported = torch.export.export(layer, (x,))
    assert op in [node.target for node in exported.graph.nodes]


def test_gradients_of_the_operator(torch, layer):
    import nibble.torch

    packed, x, bias = layer.packed, torch.randn(3, 256), torch.randn(32, requires_grad=True)
    y = torch.ops.nibble.linear(x, packed, 32, bias)
    assert y.grad_fn is not None and torch.ops.nibble.linear(x, packed, 32).grad_fn is None
    y.sum().backward()
    assert torch.equal(bias.grad, torch.full((32,), 3.0))
    with torch.no_grad():
        assert torch.ops.nibble.linear(x, packed, 32, bias).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(torch.ops.nibble.linear(x, packed, 32, bias=bias), y)
    x.requires_grad_()
    with pytest.raises(NotImplementedError, match="silu"):
        torch.ops.nibble.linear(x, packed, 32, activation="silu").sum().backward()
