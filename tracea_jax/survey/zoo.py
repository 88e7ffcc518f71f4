"""Layers of well-known models, by the sizes that do not depend on how they are used.

Numbers of tokens, batches and what is fused with a layer are drawn with the problem.
"""

from __future__ import annotations

from collections.abc import Iterator


def _products() -> Iterator[tuple[int, int]]:
    """Columns and depth (n, k) of the products of transformers."""
    models = (
        # width, hidden, columns of queries, keys and values together
        *((4096, 14336, 6144), (8192, 28672, 10240), (3584, 18944, 4608)),
        *((8192, 29568, 10240), (2048, 16384, 2560), (768, 3072, 2304)),
        *((1024, 4096, 3072), (512, 2048, 1536), (384, 1536, 1152)),
    )
    for width, hidden, together in models:
        yield from ((hidden, width), (width, hidden), (together, width), (width, width))
    yield from ((50257, 768), (32000, 4096), (1000, 1024), (1000, 2048))


PRODUCTS = tuple(_products())

# Side of the image, channels of x and y, side of the window, stride, groups.
CONVOLUTIONS: tuple[tuple[int, int, int, int, int, int], ...] = (
    # ResNet-50
    *((224, 3, 64, 7, 2, 1), (56, 64, 64, 1, 1, 1), (56, 64, 64, 3, 1, 1)),
    *((56, 64, 256, 1, 1, 1), (56, 256, 64, 1, 1, 1), (56, 256, 512, 1, 2, 1)),
    *((56, 128, 128, 3, 2, 1), (28, 512, 128, 1, 1, 1), (28, 128, 128, 3, 1, 1)),
    *((28, 128, 512, 1, 1, 1), (28, 256, 256, 3, 2, 1), (28, 512, 1024, 1, 2, 1)),
    *((14, 1024, 256, 1, 1, 1), (14, 256, 256, 3, 1, 1), (14, 256, 1024, 1, 1, 1)),
    *((14, 512, 512, 3, 2, 1), (7, 512, 512, 3, 1, 1), (7, 2048, 512, 1, 1, 1)),
    # the U-Net of Stable Diffusion
    *((64, 320, 320, 3, 1, 1), (32, 640, 640, 3, 1, 1), (16, 1280, 1280, 3, 1, 1)),
    *((64, 960, 320, 3, 1, 1), (32, 1280, 640, 1, 1, 1), (64, 320, 320, 3, 2, 1)),
    # ConvNeXt-T
    *((224, 3, 96, 4, 4, 1), (56, 96, 96, 7, 1, 96), (28, 192, 192, 7, 1, 192)),
    *((14, 384, 384, 7, 1, 384), (7, 768, 768, 7, 1, 768), (56, 96, 192, 2, 2, 1)),
    # EfficientNet-B0
    *((224, 3, 32, 3, 2, 1), (112, 32, 32, 3, 1, 32), (112, 96, 96, 3, 2, 96)),
    *((56, 144, 144, 5, 2, 144), (28, 240, 240, 3, 2, 240), (14, 672, 672, 5, 1, 672)),
    *((112, 16, 96, 1, 1, 1), (28, 240, 40, 1, 1, 1), (14, 672, 112, 1, 1, 1)),
    # ResNeXt-50 32x4d
    *((56, 128, 128, 3, 1, 32), (28, 256, 256, 3, 1, 32), (14, 512, 512, 3, 1, 32)),
)

# Heads of queries and of keys, columns of a head, columns of its values.
HEADS: tuple[tuple[int, int, int, int], ...] = (
    *((32, 8, 128, 128), (64, 8, 128, 128), (28, 4, 128, 128), (12, 12, 64, 64)),
    *((16, 16, 256, 256), (8, 1, 256, 256), (16, 16, 192, 128), (20, 20, 64, 64)),
    *((16, 16, 64, 64), (6, 6, 64, 64), (8, 8, 40, 40), (10, 10, 64, 64)),
)
