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
    """ResNet-18 (He et al., 2015), of ``width`` channels at first.

    ``smooth`` puts SiLU and means in place of ReLU and maxima, whose gradients jump
    where rounding decides a sign.
    """

    def __init__(
        self, width: int = 64, classes: int = 1000, smooth: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.SiLU(inplace=True) if smooth else nn.ReLU(inplace=True)
        self.maxpool = (nn.AvgPool2d if smooth else nn.MaxPool2d)(3, 2, 1)
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
