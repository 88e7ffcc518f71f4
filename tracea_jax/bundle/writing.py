"""A compiled graph as a directory; ``kernels/capi/program.cc`` reads it.

manifest.json     inputs, outputs, arrays, steps, and the plans for people
constants.bin     weights, each aligned
kernels/*.cubin   compiled CUDA kernels
SHA256SUMS        of every file, as ``sha256sum -c`` reads it
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import platform
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

import tracea_jax
from tracea_jax.bundle.arrays import View
from tracea_jax.bundle.program import Program, Step, image_name
from tracea_jax.device import CudaDevice

FORMAT = "tracea-bundle"
VERSION = 1  # of the manifest; kernels/capi/program.h has the same number
SUMS = "SHA256SUMS"

Named = Sequence[tuple[str, View]]


def checked(path: str | os.PathLike[str]) -> pathlib.Path:
    """The path, if a bundle may be written there.

    Raises:
      FileExistsError: if something else is there.
    """
    place = pathlib.Path(path)
    if place.exists() and not (place / SUMS).is_file():
        if not (place.is_dir() and not any(place.iterdir())):
            raise FileExistsError(f"{place} is there already, and is no bundle")
    return place


def named(root: str, paths: Sequence[Any], views: Sequence[View]) -> Named:
    """The arrays with their names: "args[0]['x']"."""
    names = [f"{root}{jax.tree_util.keystr(path)}" for path in paths]
    return list(zip(names, views, strict=True))


def write(place: pathlib.Path, program: Program, inputs: Named, outputs: Named) -> None:
    """Writes all files beside the place, then puts them there.

    Where that fails, what was there before is there again.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    made = _beside(place)
    try:
        made.chmod(0o755)
        _write_files(made, program, inputs, outputs)
        _put(made, place)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _beside(place: pathlib.Path) -> pathlib.Path:
    """A new directory, hidden, on the same file system."""
    return pathlib.Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))


def _put(made: pathlib.Path, place: pathlib.Path) -> None:
    if not place.exists():
        os.replace(made, place)
        return
    old = _beside(place)  # no system call that Python has exchanges directories
    os.replace(place, old / place.name)
    try:
        os.replace(made, place)
    except BaseException:
        os.replace(old / place.name, place)
        old.rmdir()
        raise
    shutil.rmtree(old)


def _write_files(
    place: pathlib.Path, program: Program, inputs: Named, outputs: Named
) -> None:
    constants = bytearray(program.constants_bytes)
    for room in program.constants:
        assert room.data is not None
        constants[room.offset : room.offset + room.bytes] = room.data.tobytes()
    files = {
        "manifest.json": f"{_manifest(program, inputs, outputs)}\n".encode(),
        "constants.bin": bytes(constants),
        **{image_name(cubin): cubin.image for cubin in program.cubins},
    }
    for name, content in files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    sums = [
        f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for name, content in files.items()
    ]
    (place / SUMS).write_text("".join(sums))


def _manifest(program: Program, inputs: Named, outputs: Named) -> str:
    is_cuda = isinstance(program.device, CudaDevice)
    views: dict[View, int] = {}
    for step in program.steps:
        for view in (*step.reads, *step.writes):
            views.setdefault(view, len(views))
    data = {
        "format": FORMAT,
        "version": VERSION,
        "made_by": f"tracea_jax {tracea_jax.__version__}",
        "platform": "cuda" if is_cuda else "cpu",
        "arch": program.device.arch if is_cuda else platform.machine(),
        "device": str(program.device),
        "inputs": [_spec(name, view) for name, view in inputs],
        "outputs": [_spec(name, view) for name, view in outputs],
        "workspace_bytes": program.workspace_bytes,
        "constants_bytes": program.constants_bytes,
        "values": [view.to_json() for view in views],
        "steps": [_step(step, views) for step in program.steps],
        "plans": [
            {
                "source": _line(source),
                "problem": plan.problem.to_json(),
                "variant": plan.variant,
                "config": dataclasses.asdict(plan.config),
                "origin": plan.origin,
                "reason": plan.reason,
            }
            for source, plan in program.plans
        ],
    }
    return json.dumps(data, indent=1)


def _spec(name: str, view: View) -> dict[str, Any]:
    return {"name": name, "dtype": view.dtype, "shape": list(view.shape)}


def _step(step: Step, views: dict[View, int]) -> dict[str, Any]:
    return {
        "kind": step.kind,
        **step.fields,
        "reads": [views[view] for view in step.reads],
        "writes": [views[view] for view in step.writes],
        "source": _line(step.source),
    }


def _line(source: str) -> str:
    """The line of a program without the directory, which is nobody else's business."""
    return source.rpartition(os.sep)[2]
