"""Models of PyTorch with our convolutions: values, gradients, formats, fallbacks."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from processes import run_python  # noqa: E402
from torch_models import ResNet18, decisions  # noqa: E402

import tracea_jax as tracea  # noqa: E402
from tracea_jax.interop import torch as interop  # noqa: E402

nn: Any = torch.nn


def seeded(make: Any) -> Any:
    torch.manual_seed(0)
    return make()


def loss_and_gradients(model: Any, x: Any, weigh: Any = None) -> list[Any]:
    """The outputs, the gradient of the input, and those of all parameters.

    Cotangents are the same float32 numbers in every dtype that holds them; ``weigh`` is
    a function of these.
    """
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    cotangents = torch.linspace(-1, 1, y.numel())
    if weigh is not None:
        cotangents = weigh(cotangents)
    y.backward(cotangents.to(y.dtype).view_as(y))
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def rounding_bounds(layer: Any, x: Any) -> list[Any]:
    """How far float32 results of a convolution may be from the exact ones.

    Each is a sum of n products. Added in any order, with or without fused operations,
    it is off by at most gamma_n times the sum of the products' magnitudes, where
    gamma_n = n u / (1 - n u) and u = 2^-24 (Higham, Accuracy and Stability of Numerical
    Algorithms, section 3.1). The magnitudes are those of the same convolution of
    absolute values.
    """
    positive = copy.deepcopy(layer).double()
    with torch.no_grad():
        for parameter in positive.parameters():
            parameter.abs_()
    sums = loss_and_gradients(positive, x.double().abs(), torch.abs)
    outputs, inputs, *taps = layer.weight.shape
    window = math.prod(taps)
    pixels = sums[0].numel() // layer.out_channels  # of all images
    counts = [window * inputs + 1, window * outputs // layer.groups, pixels, pixels]
    u = 2.0**-24
    return [n * u / (1 - n * u) * s for n, s in zip(counts, sums, strict=False)]


def error(found: Any, exact: Any) -> float:
    return float((found.double() - exact).norm() / exact.norm())


# --- arrays ---------------------------------------------------------------------------


def test_arrays_share_memory_with_tensors():
    x = torch.randn(3, 4)
    array = interop.to_jax(x)
    assert array.unsafe_buffer_pointer() == x.data_ptr()
    back = interop.to_torch(array)
    assert back.data_ptr() == x.data_ptr() and torch.equal(back, x)


@pytest.mark.parametrize(
    "dtype",
    [*"float32 bfloat16 float16 float8_e4m3fn int32 uint16 bool complex64".split()],
)
def test_dtypes_are_kept(dtype):
    x = torch.ones(5).to(getattr(torch, dtype))
    array = interop.to_jax(x)
    assert array.dtype == jnp.dtype(dtype) and (array == 1).all()
    assert interop.to_torch(array).dtype == x.dtype


def test_tensors_are_freed_by_threads_of_python():
    """A thread of XLA that waits for Python's lock aborts a program that ends."""
    freed_by = set()

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            freed_by.add(threading.get_ident())

    square = jax.jit(lambda x: x @ x)
    for _ in range(300):
        x = torch.ones(64, 64).as_subclass(Watched)
        array = interop.to_jax(x)
        del x
        y = square(array)
        del array
        jax.block_until_ready(y)
    gc.collect()
    assert freed_by == {threading.get_ident()}


def test_no_dtype_is_narrowed_in_silence():
    with pytest.raises(TypeError, match="torch.float64 would become .* float32"):
        interop.to_jax(torch.ones(3).double())
    with jax.enable_x64(True):
        assert interop.to_jax(torch.ones(3).double()).dtype == jnp.float64


def test_views_that_only_mark_a_sign_keep_their_values():
    x = torch.randn(5)
    np.testing.assert_array_equal(interop.to_jax(torch._neg_view(x)), -x.numpy())


# --- layers ---------------------------------------------------------------------------

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"kernel_size": 3},
    "padded": {"kernel_size": (3, 5), "padding": (1, 2), "stride": (2, 1)},
    "same": {"kernel_size": 4, "padding": "same", "dilation": 2},
    "valid": {"kernel_size": 1, "padding": "valid", "stride": 3},
    "grouped": {"kernel_size": 3, "groups": 2, "bias": False},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
}


@pytest.mark.parametrize("is_last", [False, True], ids=["NCHW", "channels_last"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_what_it_was(name, is_last):
    layer = seeded(lambda: nn.Conv2d(4, 8, **LAYERS[name]))
    x = torch.randn(2, 4, 11, 13)
    if is_last:
        layer = layer.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    strides = layer(x).stride()
    ours = loss_and_gradients(interop.patch_conv2d(layer), x)
    assert layer.fallback is None and layer(x).stride() == strides
    bounds = rounding_bounds(interop.unpatch(layer), x)
    exact = loss_and_gradients(layer.double(), x.double())
    for mine, true, bound in zip(ours, exact, bounds, strict=True):
        assert ((mine.double() - true).abs() <= bound).all()


def test_an_image_without_a_batch():
    layer = interop.patch_conv2d(seeded(lambda: nn.Conv2d(3, 5, 3)))
    x = torch.randn(3, 7, 7)
    assert torch.allclose(layer(x), layer(x[None])[0])
    assert layer(x).shape == (5, 5, 5) and layer.fallback is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_layers_round_once(dtype):
    layer = seeded(lambda: nn.Conv2d(16, 8, 3)).to(getattr(torch, dtype))
    x = torch.randn(1, 16, 9, 9).to(getattr(torch, dtype))
    with torch.no_grad():
        y = interop.patch_conv2d(layer)(x)
        exact = copy.deepcopy(interop.unpatch(layer)).double()(x.double())
    assert y.dtype == x.dtype and error(y, exact) < torch.finfo(y.dtype).eps


def test_sizes_and_biases_that_torch_takes():
    plain = seeded(lambda: nn.Conv2d(3, 4, 3))
    plain.stride = plain.padding = plain.dilation = 2
    plain.bias = nn.Parameter(torch.ones(1).expand(4))
    x = torch.randn(2, 3, 9, 9)
    ours = interop.patch_conv2d(copy.deepcopy(plain))
    torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-5)
    assert ours.fallback is None


def test_only_gradients_that_are_wanted_are_computed():
    layer = interop.patch_conv2d(seeded(lambda: nn.Conv2d(3, 5, 3)))
    x = torch.randn(1, 3, 7, 7)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is None and layer.weight.grad is None
    assert torch.allclose(layer.bias.grad, torch.full((5,), 25.0))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not layer(x).requires_grad and layer.fallback is None


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_gradients_of_gradients_are_those_of_torch():
    def penalty(layer: Any) -> list[Any]:
        layer.zero_grad()
        x = torch.linspace(-1, 1, 147).view(1, 3, 7, 7).requires_grad_()
        (dx,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
        dx.pow(2).sum().backward()
        return [dx.detach(), layer.weight.grad.clone(), x.grad]

    for padding in (1, "same"):
        layer = seeded(lambda p=padding: nn.Conv2d(3, 5, 2, padding=p))
        theirs = penalty(layer)
        for mine, his in zip(penalty(interop.patch_conv2d(layer)), theirs, strict=True):
            assert torch.allclose(mine, his, rtol=1e-4, atol=1e-5)


def test_writing_into_results_and_weights_is_seen_by_the_next_call():
    layer = interop.patch_conv2d(seeded(lambda: nn.Conv2d(3, 5, 1, bias=False)))
    x = torch.randn(1, 3, 4, 4)
    with torch.no_grad():
        y = layer(x)
        kept = y.clone()
        torch.relu_(y)
        assert torch.equal(layer(x), kept)
        layer.weight.mul_(2)
        assert torch.allclose(layer(x), 2 * kept)


@pytest.mark.parametrize("is_last", [False, True], ids=["NCHW", "channels_last"])
def test_results_may_be_updated_in_place(is_last):
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True)))
    x = torch.randn(2, 3, 6, 6)
    if is_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    theirs = loss_and_gradients(copy.deepcopy(model), x)
    ours = loss_and_gradients(interop.patch_conv2d(model), x)
    for mine, his in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, his, rtol=1e-4, atol=1e-5)


# --- models ---------------------------------------------------------------------------


SMALL = {"width": 16, "classes": 10}
FULL: dict[str, Any] = {}  # as torchvision has it


@pytest.mark.parametrize(
    ("size", "of_model", "is_training"),
    [
        (64, SMALL, True),
        (64, SMALL, False),
        pytest.param(224, FULL, False, marks=pytest.mark.slow),
    ],
    ids=["small-train", "small", "full"],
)
def test_resnet_18_in_one_call(size, of_model, is_training):
    model = seeded(lambda: ResNet18(**of_model)).train(is_training)
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)
    exact = loss_and_gradients(copy.deepcopy(model).double(), x.double())
    theirs = loss_and_gradients(copy.deepcopy(model), x)
    names = [name for name, _ in model.named_parameters()]
    kept = {name: p.data_ptr() for name, p in model.state_dict().items()}

    patched = tracea.interop.torch.patch_conv2d(model)
    ours = loss_and_gradients(patched, x)

    assert patched is model and [n for n, _ in model.named_parameters()] == names
    assert {n: p.data_ptr() for n, p in model.state_dict().items()} == kept
    report = interop.layers(model)
    assert report.replaced == len(report.layers) == 20
    assert "ResNet18: 20 of 20 convolutions" in str(report)
    # In training the errors grow from layer to layer, with luck in either's favour.
    for mine, his, true in zip(ours, theirs, exact, strict=True):
        assert error(mine, true) <= 2 * error(his, true) + 1e-6
    assert interop.layers(interop.unpatch(model)).replaced == 0
    assert {type(m) for m in model.modules() if isinstance(m, nn.Conv2d)} == {nn.Conv2d}


@pytest.mark.slow
def test_gradients_of_a_whole_resnet_where_its_relus_decide_as_they_did():
    # Of millions of ReLUs one or two decide by rounding, in torch as in ours, and not
    # always the same ones: alone, they are an error of 1e-2 where others are of 1e-5.
    model = seeded(ResNet18).train().to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    errors = []
    for run in (copy.deepcopy(model), interop.patch_conv2d(copy.deepcopy(model))):
        decided = decisions(run)
        found = loss_and_gradients(run, x)
        exact = copy.deepcopy(model).double()
        decisions(exact, decided)
        true = loss_and_gradients(exact, x.double())
        assert decided == []
        errors.append([error(*pair) for pair in zip(found, true, strict=True)])
    for his, mine in zip(*errors, strict=True):
        assert mine <= 2 * his + 1e-6


def test_an_optimizer_and_hooks_do_not_notice():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    other = copy.deepcopy(model)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    interop.patch_conv2d(model)
    x = torch.randn(2, 3, 8, 8)
    for m, o in ((model, optimizer), (other, other_optimizer)):
        for _ in range(3):
            o.zero_grad()
            m(x).pow(2).mean().backward()
            o.step()
    assert torch.allclose(model[0].weight, other[0].weight, rtol=1e-4, atol=1e-6)
    assert len(seen) == 6  # the copy has the hook too


def test_a_patched_model_is_copied_and_pickled():
    layer = interop.patch_conv2d(seeded(lambda: nn.Conv2d(3, 4, 3)))
    x = torch.randn(1, 3, 5, 5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is interop.TraceaConv2d
        assert torch.equal(other(x), layer(x))
    made = interop.TraceaConv2d(64, 128, kernel_size=3, padding=1)
    assert made(torch.randn(1, 64, 8, 8)).shape == (1, 128, 8, 8)


# --- what is left to torch ------------------------------------------------------------


def test_layers_that_compute_something_else_stay():
    class Mine(nn.Conv2d):
        pass

    model = nn.Sequential(
        Mine(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect")
    )
    mine, padded = interop.layers(interop.patch_conv2d(model)).layers
    assert "its class is Mine" in str(mine.fallback)
    assert padded.fallback == "padding_mode reflect; it takes zeros"


def test_what_a_call_was_left_for_is_said_after_it():
    layer = interop.patch_conv2d(seeded(lambda: nn.Conv2d(3, 4, 3)))
    x = torch.randn(1, 3, 5, 5)
    calls = {
        "input of torch.float64; it takes": lambda: layer.double()(x.double()),
        "input is empty": lambda: layer.float()(x[:0]),
        "autocast chooses the dtype": lambda: autocast(layer, x),
        "torch.func transforms": lambda: torch.func.vmap(layer)(x[None]),
        "the call is traced": lambda: traced(layer, x),
        "input has shape": lambda: pytest.raises(RuntimeError, layer, x[:, :2]),
        "smaller than the kernel": lambda: pytest.raises(
            RuntimeError, layer, x[..., :2]
        ),
        "input has a tangent": lambda: tangent(layer, x),
        "input is on meta": lambda: layer(x.to("meta")),
    }
    for sentence, call in calls.items():
        call()
        (said,) = interop.layers(layer).layers
        assert sentence in str(said.fallback)
    layer(x)
    assert layer.fallback is None


def test_a_forked_child_leaves_to_torch_what_jax_has_no_threads_for():
    """JAX would wait there for threads that the child does not have, for ever."""
    program = """
        import os, signal, sys, warnings
        import torch
        from tracea_jax.interop.torch import patch_conv2d

        warnings.simplefilter("ignore")  # forking is warned of by Python and by JAX
        torch.set_num_threads(1)  # as in workers of DataLoader
        plain = torch.nn.Conv2d(8, 8, 3)
        model, x = patch_conv2d(torch.nn.Conv2d(8, 8, 3)), torch.randn(2, 8, 9, 9)
        model.load_state_dict(plain.state_dict())
        if sys.argv[1] == "started":
            model(x)
        child = os.fork()
        if not child:
            signal.alarm(100)
            is_equal = torch.allclose(model(x), plain(x), atol=1e-5)
            print(is_equal, model.fallback, flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(x)
        assert model.fallback is None
    """
    assert "True the process was forked" in run_python(program, "started")
    assert "True None" in run_python(program, "not yet")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_is_made_of_what_was_unpatched():
    model = nn.Sequential(seeded(lambda: nn.Conv2d(3, 4, 3)), nn.ReLU())
    x = torch.randn(1, 3, 5, 5)
    interop.patch_conv2d(model)
    with pytest.raises(TypeError, match="unpatch.* has them"):
        torch.jit.script(model)
    script = torch.jit.script(interop.unpatch(copy.deepcopy(model)))
    assert torch.allclose(script(x), model(x), rtol=1e-4, atol=1e-5)
    assert type(model[0]) is interop.TraceaConv2d


def test_only_modules_are_patched():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, not a value of int"):
        interop.patch_conv2d(3)


def traced(layer: Any, x: Any) -> None:
    with warnings.catch_warnings(action="ignore"):  # ``jit.trace`` is deprecated
        program = torch.jit.trace(layer, x, check_trace=False)
    assert "aten::_convolution" in str(program.inlined_graph)


def tangent(layer: Any, x: Any) -> None:
    forward_ad = torch.autograd.forward_ad
    # It loads what torch compiles by ``jit.script``, which is deprecated.
    with warnings.catch_warnings(action="ignore"), forward_ad.dual_level():
        y = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(y).tangent.shape == y.shape


def autocast(layer: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    return y


def test_an_implementation_is_chosen_for_all_layers():
    layer = nn.Conv2d(32, 32, 3)
    x = torch.randn(1, 32, 9, 9)
    found = [
        interop.patch_conv2d(layer, implementation=name)(x).detach().numpy()
        for name in ("xla", "conv2d_cpu")
    ]
    np.testing.assert_allclose(*found, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="implementation='cudnn' is unknown"):
        interop.patch_conv2d(layer, implementation="cudnn")
