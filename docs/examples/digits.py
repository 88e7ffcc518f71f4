"""The handwritten digits of scikit-learn, which come with it: 1797 images of 8 x 8."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from sklearn import datasets

SIZE, CLASSES = 8, 10


def images_and_labels() -> tuple[np.ndarray, np.ndarray]:
    """Images of mean 0 and variance 1, (1797, 8, 8, 1) float32, and labels."""
    data = datasets.load_digits()
    images = data.images[..., None].astype(np.float32)
    images = (images - images.mean()) / images.std()
    return images, data.target.astype(np.int32)


def batches(
    steps: int, size: int, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random images with their labels."""
    images, labels = images_and_labels()
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = rng.choice(len(images), size, replace=False)
        yield images[chosen], labels[chosen]
