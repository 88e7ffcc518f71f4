"""Models of PyTorch whose tensors lie on a GPU: values, gradients, streams, ends."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from processes import run_python  # noqa: E402

from tracea_jax.interop import torch as interop  # noqa: E402

pytestmark = pytest.mark.gpu
nn: Any = torch.nn

FORMATS = {
    "channels first": torch.contiguous_format,
    "channels last": torch.channels_last,
}
# Of a product of 576 in the dtype, and of float32 as TF32: the relative error at most.
BOUNDS = {"float32": 2e-3, "bfloat16": 2e-2, "float16": 3e-3}


def block() -> Any:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(8, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 24, 1, bias=False),
    )
    return nn.Sequential(*layers)


def results(model: Any, x: Any) -> list[Any]:
    """The output, the gradient of the input, and those of the parameters."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y) / y.numel())
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_values_and_gradients_are_those_of_torch(dtype, memory_format):
    kind = getattr(torch, dtype)
    plain = block().cuda().to(dtype=kind, memory_format=FORMATS[memory_format])
    patched = interop.patch_conv2d(copy.deepcopy(plain))
    exact = copy.deepcopy(plain).double()
    x = torch.randn(3, 8, 17, 13, device="cuda", dtype=kind)
    x = x.to(memory_format=FORMATS[memory_format])
    found = results(patched, x)
    assert interop.layers(patched).replaced == 3
    for ours, right in zip(found, results(exact, x.double()), strict=True):
        assert ours.device == x.device and ours.dtype == kind
        error = (ours.double() - right).norm() / right.norm()
        assert float(error) < BOUNDS[dtype]


def test_a_layer_reads_what_torch_has_queued_and_writes_after_it():
    """No side waits for the other but by the streams of the tensors."""
    layer = interop.patch_conv2d(nn.Conv2d(64, 64, 1, bias=False)).cuda()
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64, device="cuda").view(64, 64, 1, 1))
        slow = torch.randn(4096, 4096, device="cuda")
        for i in range(10):
            x = torch.zeros(8, 64, 32, 32, device="cuda")
            for _ in range(5):
                slow = torch.tanh(slow @ slow)
            x += i  # queued behind the products
            y = layer(x)
            x.fill_(-1.0)
            assert torch.equal(y, torch.full_like(y, i))
    assert layer.fallback is None


def test_programs_with_tensors_on_a_gpu_end():
    for _ in range(3):
        run_python(
            """
            import warnings
            warnings.simplefilter("ignore")
            import torch
            from tracea_jax.interop import torch as interop

            layer = interop.patch_conv2d(torch.nn.Conv2d(16, 16, 3)).cuda()
            x = torch.randn(2, 16, 9, 9, device="cuda", requires_grad=True)
            for _ in range(4):
                layer(x).sum().backward()
            assert layer.fallback is None, layer.fallback
            """
        )
