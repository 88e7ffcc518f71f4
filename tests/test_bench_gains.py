"""The README's table of whole programs, from rows of several runs."""

from __future__ import annotations

import json
import pathlib

import pytest

pytestmark = pytest.mark.once


def ran(directory: pathlib.Path, date: str, *rows: dict[str, object]) -> None:
    directory.mkdir(exist_ok=True)
    file = directory / f"programs_{len(list(directory.iterdir()))}.json"
    file.write_text(json.dumps({"environment": {"date": date}, "rows": rows}))


def step(name: str, ratio: float, dtype: str = "bfloat16", **other: object):
    return {"name": name, "text": f"8 x 8, {dtype}", "wall_ratio": ratio} | other


def test_the_newest_run_counts_and_of_one_day_the_slowest(module, tmp_path):
    gpu, cpu = tmp_path / "nvidia_h100", tmp_path / "some_cpu"
    ran(gpu, "2026-01-03", step("vit_step", 1.66), step("gpt2_step", 2.0))
    ran(gpu, "2026-01-02", step("vit_step", 9.0))
    ran(gpu, "2026-01-03", step("vit_step", 1.5))
    ran(gpu, "2026-01-04", step("vit_step", 8.0, effort="quick"))
    ran(gpu, "2026-01-04", step("vit_step", 8.0, failed="no memory"))
    ran(cpu, "2026-01-01", step("vit_step", 0.94, "float32"))
    line = "| training a Transformer | 0.9 | - | 1.5 to 2.0 |"
    assert line in module("gains").gains(tmp_path)


def test_ops_that_are_called_by_hand_are_no_gain_of_transform(module):
    gains = module("gains")
    assert gains.kind_of("gelu MLP step, transform") == "training an MLP"
    assert gains.kind_of("gelu MLP, float32, step, ops") is None


def test_a_program_without_a_kind_is_an_error(module):
    with pytest.raises(ValueError, match="'bert_step'"):
        module("gains").kind_of("bert_step")
