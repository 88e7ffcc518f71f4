"""ResNet-18 in PyTorch, for the tests of ``interop.torch``."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
nn: Any = torch.nn


class Block(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, activation: Any) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = activation
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Any) -> Any:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2015), of ``width`` channels at first."""

    def __init__(self, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for i, (inputs, outputs) in enumerate(zip(widths, widths[1:], strict=False)):
            first = Block(inputs, outputs, 1 if i == 0 else 2, self.relu)
            stage = nn.Sequential(first, Block(outputs, outputs, 1, self.relu))
            setattr(self, f"layer{i + 1}", stage)
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Any) -> Any:
        y = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(4):
            y = getattr(self, f"layer{i + 1}")(y)
        return self.fc(y.mean((2, 3)))


class Decision(nn.Module):
    """Decisions of an activation or a pool by its values, recorded or given."""

    def __init__(self, noted: list[Any], given: list[Any] | None) -> None:
        super().__init__()
        self.noted, self.given = noted, given


class Relu(Decision):
    def forward(self, x: Any) -> Any:
        if self.given is not None:
            return x * self.given.pop(0)
        self.noted.append(x > 0)
        return torch.relu(x)


class Pool(Decision):
    def forward(self, x: Any) -> Any:
        if self.given is None:
            y, places = nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
            self.noted.append(places)
            return y
        places = self.given.pop(0)
        return x.flatten(2).gather(2, places.flatten(2)).view(places.shape)


def decisions(model: ResNet18, given: list[Any] | None = None) -> list[Any]:
    """The model's decisions in its next call, in order; or it decides as ``given``.

    Rounding decides where two values are nearly equal, and gradients jump there.
    """
    noted: list[Any] = []
    model.relu, model.maxpool = Relu(noted, given), Pool(noted, given)
    for block in model.modules():
        if isinstance(block, Block):
            block.relu = model.relu
    return noted
