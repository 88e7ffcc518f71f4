"""Rows of results, as the benchmarks' tables and figures look at them, for tests."""

from __future__ import annotations

import argparse


def row(group, own=None, default=1.0, **fields):
    """A row of ``bench_matmul``, as far as figures and tables look at it."""
    return {
        "group": group,
        "problem": {"op": "matmul"},
        "text": "matmul 8x8x8 bfloat16 nn",
        "variant": own and "gemm_sm90",
        "config": own and {"tile_m": 128},
        "why_no_own": None if own else "no kernel of ours takes it",
        "default_variant": "xla",
        "own_us": own and 10.0 / own,
        "default_us": 10.0 / default,
        "xla_us": 10.0,
        "ratio_own": own,
        "ratio_default": default,
        "tflops": 100.0,
        "gbs": 200.0,
        "error_of_bound": 0.5,
        "xla_error_of_bound": 0.5,
        "error_by_xla": 1.0,
        **fields,
    }


FAILED = {
    "group": "large",
    "problem": {"op": "matmul"},
    "text": "matmul 9x9x9 bfloat16 nn",
    "error": "ValueError: no\nmore",
}


WHERE = {
    "device": "Some GPU",
    "arch": "sm_90a",
    "units": 132,
    "versions": {"jax": "0.11.2"},
    "date": "2026-01-01",
}


def arguments(directory, **fields):
    known = {"out": directory, "commit": "abc", "only": None, "resume": False}
    return argparse.Namespace(**{**known, **fields})
