"""Kernels under compute-sanitizer: python benchmarks/sanitize.py

Each kind of kernel of attention, convolutions, pools and norms runs once at a small,
awkward shape, in a process of its own for each tool. The kernels are instrumented,
XLA's are not; only ``initcheck`` has to see what others write. Prints a line for each
tool, and what it complains about. With ``--part I/N`` every N-th kind runs, from the
I-th on, so that N processes share them. Names of all but attention begin with "images".
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import sanitized_convolutions
from sanitized_convolutions import executed

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND = 99  # the exit code that stands for complaints
# Graphs would hide the kernels' names; tuning XLA's own kernels takes most of the time.
_FLAGS = "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
# Kinds that a tool takes for wrong. Who reads what a bulk copy has stored reads memory
# that initcheck takes for untouched. Where taps share a copy, wgmma reads columns that
# lie over each other, and memcheck counts them as if they lay behind each other.
_MISTAKEN = {"initcheck": "ordered", "memcheck": "taps share"}
KERNELS = ("attention", *sanitized_convolutions.KERNELS)  # in the names of ours
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: .*$", re.MULTILINE)


def runs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, what to run) of each kind of kernel."""
    import jax

    for name, run in of_ops():
        yield name, jax.jit(run)
    yield from backward()
    for kind in sanitized_convolutions.kinds():
        yield kind.name, kind.run


def of_ops() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ops that programs call, with the default configs."""
    import jax
    import numpy as np

    from tracea_jax import masks
    from tracea_jax.ops import attention, paged_attention

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jax.device_put(rng.normal(size=shape).astype(jax.numpy.bfloat16))

    def qkv(q_len: int, kv_len: int, dim: int, heads: int = 2, kv_heads: int = 2):
        keys = (1, kv_len, kv_heads, dim)
        return normal(1, q_len, heads, dim), normal(*keys), normal(*keys)

    def forward(*x: jax.Array, **how: Any) -> jax.Array:
        return attention(*x, implementation="attention_sm90", **how)

    def gradients(*x: jax.Array, **how: Any) -> Any:
        return jax.vjp(lambda *x: forward(*x, **how), *x)[1](x[0])

    def decoded(*x: jax.Array, **config: Any) -> jax.Array:
        lengths = jax.device_put(np.asarray([217], np.int32))
        return attention(
            *x,
            key_value_seq_lengths=lengths,
            implementation="attention_decode_sm90",
            config={"tile_kv": 64, "blocks_per_sm": 1, **config},
        )

    x = qkv(200, 200, 64)
    wide = qkv(200, 200, 128)
    ids = jax.device_put(np.repeat([0, 1, 2], [70, 1, 129]).astype(np.int32))[None]
    bias = normal(1, 2, 200, 200)
    array = jax.device_put(
        (rng.random((1, 2, 200, 200)) < 0.7) | np.eye(200, dtype=bool)
    )
    blocks = masks.block_sparse(jax.device_put(np.eye(2, dtype=bool)), (128, 128))
    causal: dict[str, Any] = {"is_causal": True}
    kinds: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": causal,
        "window": {**causal, "local_window_size": (50, 0)},
        "documents": {**causal, "query_segment_ids": ids},
        "bias": {"bias": bias},
        "array": {"mask": array},
        "blocks": {"mask": blocks},
        "soft cap": {**causal, "logits_soft_cap": 20.0},
        "sinks": {**causal, "sinks": jax.device_put(np.ones(2, np.float32))},
        "lengths": {
            "key_value_seq_lengths": jax.device_put(np.asarray([123], np.int32))
        },
    }
    for name, how in kinds.items():
        yield f"forward, {name}", lambda how=how: forward(*x, **how)
    yield "forward, 128 columns", lambda: forward(*wide, **causal)
    for name in ("causal", "soft cap", "array", "blocks"):
        how = kinds[name]
        yield f"gradients, {name}", lambda how=how: gradients(*x, **how)

    def of_low_bias() -> Any:
        low = normal(1, 2, 200, 200) - 1e9  # of every key
        return jax.vjp(lambda bias: forward(*x, bias=bias), low)[1](x[0])

    yield "gradients, low bias", of_low_bias
    few = qkv(1, 300, 128, 16, 4)
    for config in ({}, {"splits": 3}):
        yield f"decode {config or ''}", lambda config=config: decoded(*few, **config)
    pages = normal(2, 9, 16, 64)
    table = jax.device_put(np.asarray([[3, 1, 4], [8, 0, 0]], np.int32))
    of_pages = (
        normal(2, 4, 64),
        pages,
        pages,
        jax.device_put(np.asarray([40, 5], np.int32)),
        table,
    )
    yield (
        "pages",
        lambda: paged_attention(*of_pages, implementation="paged_attention_sm90"),
    )


def backward() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Gradients of each kind, with each of the ways to come to dq."""

    from tracea_jax.emit.attention_backward_sm90 import AttentionBackwardSm90Config
    from tracea_jax.ops.attention import workload
    from tracea_jax.options import device_for
    from tracea_jax.policy import Choice
    from tracea_jax.problem import AttentionProblem
    from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

    def run(fields: dict[str, Any], choices: dict[str, Any]) -> Any:
        heads = {"heads": 2, "kv_heads": 2, "head_dim": 64, **fields}
        problem = AttentionProblem(
            **{"direction": "backward", "batch": 1, "q_len": 200, "kv_len": 200},
            **{"dtype": "bfloat16", "scale": 0.125, **heads},
        )
        variant = ATTENTION_BACKWARD_SM90
        usual = variant.heuristic(problem, device_for("cuda"))
        config = AttentionBackwardSm90Config(**choices) if choices else usual
        choice = Choice(variant=variant.name, config=config)
        return executed(workload, problem, choice)

    causal: dict[str, Any] = {"is_causal": True}
    bias = {"bias": (1, 2, 200, 200), "bias_dtype": "bfloat16", "bias_gradient": True}
    large = {"tile_kv": 128, "block_q": 64, "tile_q": 128, "block_kv": 64}
    small = {**large, "tile_kv": 64, "tile_q": 64, "dq": "beside"}
    ordered = {**large, "dq": "ordered"}
    of_two = {"heads": 4}
    kinds: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("plain", {}, {}),
        ("small", causal, small),
        ("large beside", causal, {**large, "dq": "beside"}),
        ("ordered", {**causal, "head_dim": 128}, ordered),
        ("ordered, 64 columns", causal, {**ordered, "block_q": 128}),
        ("atomic, keys shared", {**of_two, "head_dim": 128}, {**large, "dq": "atomic"}),
        ("keys shared", {**causal, **of_two}, small),
        ("documents", {**causal, "segments": True}, small),
        ("documents, large", {"segments": True, **of_two, "head_dim": 128}, large),
        ("window", {**causal, "window": (50, 0)}, small),
        ("window, large", {"window": (50, 30), "head_dim": 128}, large),
        ("bias", bias, {}),
        ("bias, 128 columns", {**bias, **causal, "head_dim": 128}, {}),
        ("bias, ordered", {**bias, "head_dim": 128}, ordered),
        ("bias of all heads", {**bias, "bias": (1, 1, 200, 200)}, {}),
        ("alibi", {**causal, "alibi": "linear"}, {}),
        ("sinks, lengths", {**causal, "sinks": True, "kv_lengths": True}, {}),
        ("96 columns", {**causal, "head_dim": 96}, {}),
        ("192 and 128 columns", {"head_dim": 192, "value_dim": 128}, {}),
        ("256 columns", {**causal, "head_dim": 256}, {}),
        ("256 columns, keys shared", {**of_two, "head_dim": 256}, {}),
    )
    for name, fields, choices in kinds:
        yield (
            f"backward, {name}",
            lambda fields=fields, choices=choices: run(fields, choices),
        )


def run_all(part: tuple[int, int], only: str, but: str) -> None:
    """Runs every kind of a part, whose name has ``only`` and not ``but``."""
    import jax

    from tracea_jax.dispatch import Unsupported

    start, step = part
    named = (of for of in runs() if only in of[0] and (not but or but not in of[0]))
    for name, run in itertools.islice(named, start, None, step):
        print("\nruns", name, flush=True)
        try:
            jax.block_until_ready(run())
        except Unsupported as e:
            print("left out", name, str(e).splitlines()[0])
        else:
            print("\nran", name, flush=True)
    print("\nran all", flush=True)


def part_of(text: str) -> tuple[int, int]:
    """(I, N) of "I/N"; I counts from 0.

    Raises:
      ValueError: if it is nothing like that.
    """
    start, step = map(int, text.split("/"))
    if not 0 <= start < step:
        raise ValueError(text)
    return start, step


def checked(
    tool: str,
    sanitizer: str,
    timeout_s: float,
    part: tuple[int, int] = (0, 1),
    only: str = "",
) -> tuple[bool, str]:
    """Returns whether a tool has nothing to complain about, and what it says."""
    command = [sanitizer, "--tool", tool, f"--error-exitcode={FOUND}"]
    command += ["--report-api-errors", "no"]  # programs ask for what there may not be
    if tool != "initcheck":
        for part_of_name in KERNELS:  # a kernel is watched if one of them is found
            command += ["--kernel-regex", f"kernel_substring={part_of_name}"]
    command += [sys.executable, str(pathlib.Path(__file__).resolve()), "--run"]
    command += ["--part", "{}/{}".format(*part), "--only", only]
    command += ["--but", _MISTAKEN.get(tool, "")]
    # Unused memory is the allocator's.
    environment = {
        **os.environ,
        "XLA_FLAGS": _FLAGS,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    }
    how: Any = {"capture_output": True, "text": True, "env": environment}
    try:
        done = subprocess.run(command, timeout=timeout_s, check=False, **how)
    except subprocess.TimeoutExpired as e:
        said = e.stdout or b""
        text = said.decode() if isinstance(said, bytes) else said
        return False, f"not done after {timeout_s:.0f} s; {text[-300:]}"
    text = done.stdout + done.stderr
    ran = re.findall(r"^ran (.*)$", text, re.MULTILINE)
    summary = "; ".join(_SUMMARY.findall(text)) or text[-2000:]
    is_clean = done.returncode == 0 and ran[-1:] == ["all"]
    details = "" if is_clean else "\n" + text[:4000]
    return is_clean, f"{'; '.join(ran)}: {summary.strip('= ')}{details}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", action="store_true", help="only run the kernels")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of each tool")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="I/N")
    parser.add_argument("--only", default="", help="kinds whose name has this")
    parser.add_argument("--but", default="", help="no kinds whose name has this")
    args = parser.parse_args()
    if args.run:
        run_all(args.part, args.only, args.but)
        return
    clean = True
    for tool in args.tools:
        how = (args.sanitizer, args.timeout_s, args.part, args.only)
        is_clean, text = checked(tool, *how)
        clean = clean and is_clean
        print(f"{tool}: {'clean' if is_clean else 'NOT CLEAN'}: {text}", flush=True)
    sys.exit(not clean)


if __name__ == "__main__":
    main()
