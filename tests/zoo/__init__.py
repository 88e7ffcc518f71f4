"""Architectures that people write, tiny, with the sites that a rewrite has to find."""

from __future__ import annotations

from zoo import gpt, layers, llama, resnet, transformers, vision
from zoo.model import Model

MODELS: tuple[Model, ...] = (
    *gpt.MODELS,
    *llama.MODELS,
    *transformers.MODELS,
    *vision.MODELS,
    *resnet.MODELS,
    *layers.MODELS,
)
