"""Draws the pictures of the README and the site: python docs/pictures.py

``explain.svg`` is the output of ``explain`` for a layer, on a GPU that need not be
there. ``programs-*.svg`` are the ratios of whole programs in benchmarks/results, for
light and dark pages. Each picture has its source as its description, which a test
compares with the present one. Needs the extras "docs" and "test".
"""

from __future__ import annotations

import io
import json
import pathlib
import re
import tempfile
import textwrap
from typing import Any
from xml.sax.saxutils import escape, unescape

import jax
import jax.numpy as jnp

import tracea_jax as tracea

ROOT = pathlib.Path(__file__).resolve().parent
OUT = ROOT / "_static"
RESULTS = ROOT.parent / "benchmarks" / "results"

# --- explain --------------------------------------------------------------------------


def layer(p: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    """Most of a layer of a language model, as people write it."""
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", y, p["o"])
    return x + (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def explained() -> str:
    """The output of ``explain`` for the layer at Llama 3 8B's sizes, on an H200."""
    weights = {"o": (32, 128, 4096), "gate": (4096, 14336), "up": (4096, 14336)}
    weights |= {"down": (14336, 4096)}
    p = {name: jax.ShapeDtypeStruct(s, "bfloat16") for name, s in weights.items()}
    arrays = [(4096,), (32, 128), (8, 128), (8, 128)]
    x, *heads = (jax.ShapeDtypeStruct((2, 4096, *s), "bfloat16") for s in arrays)
    # By what ships, whatever was tuned here.
    with tempfile.TemporaryDirectory() as empty, tracea.options(cache_dir=empty):
        return str(tracea.explain(layer, device="H200")(p, x, *heads))


def draw_explained(text: str) -> str:
    """The text in a terminal, as SVG without anything from another host."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    shown = Text("\n".join(map(_wrapped, text.splitlines())))
    shown.highlight_regex(re.compile(r"^\S.*$", re.MULTILINE), "bold")
    shown.highlight_regex(re.compile(TIMES), "yellow")
    console.print(shown)
    drawn = console.export_svg(
        title="print(tracea.explain(layer, device='H200')(p, x, q, k, v))",
        code_format=_WINDOW.replace("DESCRIPTION", escape(text)),
        unique_id="explain",
    )
    return re.sub(r" +$", "", drawn, flags=re.MULTILINE)


def _wrapped(line: str) -> str:
    """The line, broken with an indent where it is too long for the window."""
    indent = len(line) - len(line.lstrip()) + 2
    return textwrap.fill(line, _COLUMNS, subsequent_indent=" " * indent)


_COLUMNS = 100
TIMES = r"\b\d[\d.]* (us|ms|s)\b"
_WINDOW = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<desc>DESCRIPTION</desc>
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, monospace; }}
.{unique_id}-matrix {{ font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" \
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""

# --- whole programs -------------------------------------------------------------------

# The programs that are drawn, by their names in the results; the first ones of each
# device.
_NAMES = {
    "gpt2_step": "GPT-2, training step",
    "vit_step": "ViT, training step",
    "llama_block_step": "Llama 3 8B layer, training step",
    "llama_decode donated": "Llama 3 8B layer, decoding",
    "llama_decode kept": "Llama 3 8B layer, decoding, caches kept",
    "resnet50_step": "ResNet-50, training step",
    "resnet50_inference": "ResNet-50, inference",
    "convnext_step": "ConvNeXt, training step",
    "efficientnet_step": "EfficientNet, training step",
    "efficientnet_inference": "EfficientNet, inference",
    "unet_block_step": "U-Net block, 320 channels, training step",
    "unet_block": "U-Net block, 320 channels, inference",
    "unet_block_640_step": "U-Net block, 640 channels, training step",
    "unet_block_640": "U-Net block, 640 channels, inference",
}
MOST_BARS = 6  # of each device


def measured(results: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
    """Whole programs as installed, untuned: plain time by ours, by device.

    Of each program and dtype, the newest run counts, and of several on one day the
    slowest.
    """
    newest: dict[tuple[str, str, str], tuple[str, float]] = {}
    for file in results.glob("*/programs*.json"):
        result = json.loads(file.read_text())
        where = result["environment"]
        for row in result["rows"]:
            if row["effort"] != "none" or "failed" in row:
                continue
            key = where["device"], row["name"], row["text"].rpartition(", ")[2]
            run = where["date"], -row["wall_ratio"]
            newest[key] = max(run, newest.get(key, run))
    shown: list[dict[str, Any]] = []
    for device in sorted({device for device, *_ in newest}, reverse=True):
        own = [
            {
                "device": device,
                "program": f"{title}, {dtype}",
                "wall_ratio": round(-newest[device, name, dtype][1], 2),
            }
            for name, title in _NAMES.items()
            for dtype in sorted(d for *n, d in newest if n == [device, name])
        ]
        shown += own[:MOST_BARS]
    return shown


def draw_measured(rows: list[dict[str, Any]], *, is_dark: bool) -> str:
    """Bars of the wall-clock ratios, losses included."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    ink, bar, faint = _DARK if is_dark else _LIGHT
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tracea_jax",
        "font.family": "sans-serif",
        "font.size": 11,
        **dict.fromkeys(("text.color", "axes.labelcolor", "ytick.color"), ink),
    }
    begins = [
        i == 0 or row["device"] != rows[i - 1]["device"] for i, row in enumerate(rows)
    ]
    places = [i + 1.1 * sum(begins[: i + 1]) for i in range(len(rows))]
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6.5, 0.3 * places[-1] + 0.9))
        axes.barh(places, [r["wall_ratio"] for r in rows], height=0.84, color=bar)
        axes.set_yticks(places, [f"{r['wall_ratio']:.2f}x" for r in rows])
        axes.tick_params(length=0)
        axes.set_xticks([])
        axes.spines[:].set_visible(False)
        end = places[-1] + 1
        axes.plot([1, 1], [0, end], color=faint, linewidth=1, dashes=(4, 3))
        axes.text(1.03, end, "plain JAX = 1", color=faint, va="center")
        for begin, place, row in zip(begins, places, rows, strict=True):
            axes.text(0.03, place, row["program"], va="center")
            if begin:
                axes.text(0, place - 0.95, row["device"], color=faint, va="center")
        axes.set_ylim(end + 0.4, -0.2)
        file = io.StringIO()
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            bbox_inches="tight",
            metadata={"Date": None, "Creator": None},
        )
        plt.close(figure)
    text = f"<desc>{escape(json.dumps(rows))}</desc>"
    drawn = re.sub(r"(<svg[^>]*>)", rf"\1\n {text}", file.getvalue(), count=1)
    return re.sub(r" +$", "", drawn, flags=re.MULTILINE)


# Text, bars, and what is less important.
_LIGHT = ("#1f2328", "#b6d9f7", "#6e7781")
_DARK = ("#e6edf3", "#1f4b7a", "#8b949e")

# --- all ------------------------------------------------------------------------------


def description(name: str) -> str:
    """The source of a picture, which it has as its description."""
    (found,) = re.findall("<desc>(.*?)</desc>", (OUT / name).read_text(), re.DOTALL)
    return unescape(found)


def main() -> None:
    (OUT / "explain.svg").write_text(draw_explained(explained()))
    for name, is_dark in (("light", False), ("dark", True)):
        drawn = draw_measured(measured(), is_dark=is_dark)
        (OUT / f"programs-{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
