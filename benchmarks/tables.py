"""Writes the README's measured tables from result files: python benchmarks/tables.py

Between a pair of markers <!-- table: NAME --> and <!-- end --> stands what the function
of that name makes of the results; a test compares.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent
README = ROOT.parent / "README.md"
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(readme: str, results: pathlib.Path) -> str:
    """The README's text with every marked table made anew."""
    return _MARKED.sub(lambda m: m[1] + TABLES[m[2]](results) + m[3], readme)


def matmul(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_matmul``."""
    files = sorted(results.glob("*/matmul.json"))
    return "".join(_matmul_table(json.loads(f.read_text())) for f in files) or "\n"


def _matmul_table(result: dict[str, Any]) -> str:
    lines = [
        _head(result["environment"]),
        "| problem | kernel | ours, us | XLA, us | XLA / ours | TFLOP/s |",
        "|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['text'].removeprefix('matmul ')} | {r['variant']} | {r['ours_us']:.1f} "
        f"| {r['xla_us']:.1f} | {r['ratio']:.2f} | {r['tflops']:.3g} |"
        for r in result["rows"]
    ]
    return "\n".join(lines) + "\n\n"


def models(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_models``."""
    files = sorted(results.glob("*/models.json"))
    return "".join(_models_table(json.loads(f.read_text())) for f in files) or "\n"


def _models_table(result: dict[str, Any]) -> str:
    lines = [
        _head(result["environment"]),
        "| model | ours, us | plain JAX, us | plain / ours | wall-clock |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['name']} | {r['ours_us']:.1f} | {r['plain_us']:.1f} "
        f"| {r['ratio']:.2f} | {r['wall_ratio']:.2f} |"
        for r in result["rows"]
    ]
    return "\n".join(lines) + "\n\n"


def tuner(results: pathlib.Path) -> str:
    """F(n) of the methods that ``bench_tuner`` compares, means over the spaces."""
    rows = json.loads((results / "replay" / "tuner.json").read_text())["rows"]
    scores = {(r["method"], r["space"]): r for r in rows if "seeds" in r}
    counts = ("16", "32", "64", "96")
    lines = [f"| search | {' | '.join(counts)} |", "|---|" + "---:|" * len(counts)]
    for method, space, text in _SEARCHES:
        fraction = scores[method, space]["fraction"]
        numbers = " | ".join(f"{fraction[n]:.3f}" for n in counts)
        lines.append(f"| {text} | {numbers} |")
    return "\n" + "\n".join(lines) + "\n\n"


_SEARCHES = (
    ("ours", "mean", "ours, nothing known"),
    ("ours, fresh seeds", "mean", "ours, seeds not used when it was made"),
    ("random", "mean", "random"),
    ("kernel_tuner adaptive_tabu_greywolf", "mean", "adaptive_tabu_greywolf"),
    ("kernel_tuner genetic_algorithm", "mean", "genetic_algorithm"),
    ("kernel_tuner bayes_opt", "mean", "bayes_opt"),
    ("best of kernel_tuner", "mean", "best of 12 for each space and n"),
    ("ours, analytic model", "gemm_rtx3090", "ours with an analytic model, GEMM only"),
)


def _head(where: dict[str, Any]) -> str:
    return (
        f"\n{where['device']} ({where['arch']}, {where['units']} units), "
        f"jax {where['versions']['jax']}, {where['date']}:\n"
    )


TABLES = {"matmul": matmul, "models": models, "tuner": tuner}


def main() -> None:
    text = README.read_text()
    README.write_text(rendered(text, ROOT / "results"))


if __name__ == "__main__":
    main()
