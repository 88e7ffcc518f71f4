"""Carries shipped answers over an edit that left the machine code as it was.

    python benchmarks/carry_answers.py REV [--only PATTERN] [--dry]

An answer names its kernels by a hash of their text, so moving a line of a header
retires it. This compiles, without a GPU, the kernels of all shipped answers and
observations as REV made them and as the working tree does, wherever their text has
changed. Where machine code and launch are the same, so are the times: the records get
today's hash. The others stay as they are, which makes them answers no more.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from tracea_jax import _native, knowledge, variants
from tracea_jax.device import NAMED
from tracea_jax.emit.kernel import Kernel
from tracea_jax.policy import Choice
from tracea_jax.problem import problem_from_json
from tracea_jax.runtime import nvrtc, trust
from tracea_jax.tuning.store import volumes
from tracea_jax.tuning.store.code import code_of
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry
from tracea_jax.variants.base import kernels_in

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_DEVICES = {device.name: device for device in NAMED.values()}
_TEXT = ("entry", "source", "headers", "arch", "options")  # what is compiled
# Sections of a cubin that are run. Bank 4 of the constants is none: it has addresses of
# all static members, of which our kernels read none.
_CODE = re.compile(rb"\.text\.|\.nv\.constant[0-3]")

Texts = dict[str, Any]  # the fields of a Kernel
Compiled = tuple[str, tuple[Texts, ...]]  # a choice's hash, and its kernels


def named(entry: Entry) -> Iterator[dict[str, Any]]:
    """Variant, config and code of everything that an entry names."""
    for record in (entry.best, *entry.observations):
        yield {name: getattr(record, name) for name in ("variant", "config", "code")}
    if entry.best.runner_up:
        yield entry.best.runner_up


def identity(entry: Entry, record: dict[str, Any]) -> str:
    asked = (entry.environment.device, entry.problem, record["variant"])
    return json.dumps((*asked, record["config"]), sort_keys=True)


def compiled(entries: Iterable[Entry]) -> dict[str, Compiled]:
    """Code that this version of the package compiles for all choices of entries."""
    found: dict[str, Compiled] = {}
    for entry in entries:
        if (device := _DEVICES.get(entry.environment.device)) is None:
            continue
        for record in named(entry):
            try:
                problem = problem_from_json(entry.problem)
                variant = variants.get(problem.op, record["variant"])
                config = variants.config_from_json(variant, record["config"])
                variant.check(problem, config, device)
            except (ValueError, TypeError, KeyError):
                continue  # no choice of this version
            choice = Choice(variant=variant.name, config=config)
            kernels = kernels_in(variant.call(problem, config, device))
            texts = tuple(
                {f.name: getattr(k, f.name) for f in dataclasses.fields(k)}
                for k in kernels
            )
            found[identity(entry, record)] = code_of(problem, choice, device), texts
    return found


def compiled_at(revision: str, data: pathlib.Path) -> dict[str, Compiled]:
    """The same, of a revision of the package: this script is run on its files."""
    command = ["git", "archive", revision, "tracea_jax", "kernels"]
    files = subprocess.run(
        command, cwd=_ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(directory, filter="data")
        extension = pathlib.Path(_native.__file__)  # which makes no kernels
        (pathlib.Path(directory) / "tracea_jax" / extension.name).symlink_to(extension)
        place = pathlib.Path(directory) / "compiled.pickle"
        subprocess.run(
            [sys.executable, __file__, "--data", data, "--write", place],
            env={**os.environ, "PYTHONPATH": directory},
            check=True,
        )
        return pickle.loads(place.read_bytes())


# --- whether two choices run the same -------------------------------------------------


def sections(image: bytes) -> list[bytes]:
    """Names and contents of the sections of a cubin that the GPU executes."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    count, of_names = struct.unpack_from("<HH", image, 0x3C)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", image, table + 64 * i) for i in range(count)
    ]
    names = image[headers[of_names][4] :]
    found = [
        (names[h[0] : names.index(b"\0", h[0])], image[h[4] : h[4] + h[5]])
        for h in headers
    ]
    return [name + b"\0" + body for name, body in found if _CODE.match(name)]


def machine_code(text: tuple[Any, ...]) -> str:
    """A hash of what a kernel's text compiles to."""
    launch: dict[str, Any] = {"grid": (1, 1, 1), "block": (1, 1, 1)}
    kernel = Kernel(
        **dict(zip(_TEXT, text, strict=True)), **launch, smem_bytes=0, params=()
    )
    cubin = nvrtc.compile(kernel)
    digest = hashlib.sha256(repr((cubin.registers, cubin.stack_bytes)).encode())
    for section in sections(cubin.image):
        digest.update(section)
    return digest.hexdigest()


def text_of(kernel: Texts) -> tuple[Any, ...]:
    return tuple(kernel[name] for name in _TEXT)


def launch_of(kernel: Texts) -> str:
    """Everything else about a kernel; values, as classes may be of two versions."""
    return repr({k: v for k, v in sorted(kernel.items()) if k not in _TEXT})


def judged(before: dict[str, Compiled], now: dict[str, Compiled]) -> dict[str, bool]:
    """True if each choice whose hash has changed still runs the same machine code."""
    changed = [k for k in now if k in before and before[k][0] != now[k][0]]
    pairs = {k: (before[k][1], now[k][1]) for k in changed}
    texts = dict.fromkeys(
        text_of(kernel)
        for old, new in pairs.values()
        if [text_of(x) for x in old] != [text_of(x) for x in new]
        for kernel in (*old, *new)
    )
    print(f"{len(changed)} choices have another text; compiling {len(texts)} kernels")
    with concurrent.futures.ProcessPoolExecutor() as pool:
        code = dict(zip(texts, pool.map(machine_code, texts, chunksize=4), strict=True))

    def runs_the_same(old: tuple[Texts, ...], new: tuple[Texts, ...]) -> bool:
        return len(old) == len(new) and all(
            launch_of(x) == launch_of(y)
            and (text_of(x) == text_of(y) or code[text_of(x)] == code[text_of(y)])
            for x, y in zip(old, new, strict=True)
        )

    same = {k: runs_the_same(*pair) for k, pair in pairs.items() if pair[1]}
    # A choice whose kernels other problems choose stands for all of its variant's.
    return {k: same.get(k, all(same.values())) for k in changed}


# --- the records ----------------------------------------------------------------------


def carried(entry: Entry, codes: dict[str, tuple[str, str]]) -> Entry:
    """The entry with the second of two hashes wherever it has the first."""

    def renamed(record: dict[str, Any]) -> str:
        before, now = codes.get(identity(entry, record), ("", ""))
        code = record.get("code", "")
        return now if code and code == before else code

    def replaced(record: Any) -> Any:
        fields = {name: getattr(record, name) for name in ("variant", "config", "code")}
        return dataclasses.replace(record, code=renamed(fields))

    best = replaced(entry.best)
    if best.runner_up and best.runner_up.get("code"):
        runner_up = {**best.runner_up, "code": renamed(best.runner_up)}
        best = dataclasses.replace(best, runner_up=runner_up)
    observations = tuple(map(replaced, entry.observations))
    return dataclasses.replace(entry, best=best, observations=observations)


def read(data: pathlib.Path) -> dict[Name, Entry]:
    store = Store(data, read_only=True)
    found = {name: store.read(name, complete=True) for name in store.names()}
    return {name: entry for name, entry in found.items() if entry is not None}


def carry(args: argparse.Namespace) -> None:
    entries = read(args.data)
    now = compiled(entries.values())
    if args.only:
        now = {k: v for k, v in now.items() if re.search(args.only, json.loads(k)[2])}
    before = compiled_at(args.revision, args.data)
    same = judged(before, now)
    count = collections.Counter((json.loads(k)[2], kept) for k, kept in same.items())
    for (variant, kept), n in sorted(count.items()):
        print(f"  {variant}: {n} {'run what they ran' if kept else 'run other code'}")
    codes = {k: (before[k][0], now[k][0]) for k, kept in same.items() if kept}
    changed = {
        name: after
        for name, entry in entries.items()
        if (after := carried(entry, codes)) != entry
    }
    print(f"{len(changed)} of {len(entries)} entries change")
    if not args.dry:
        write(args.data, {**entries, **changed}, changed)


def write(
    data: pathlib.Path, entries: dict[Name, Entry], changed: Collection[Name]
) -> None:
    """Writes entries that changed where they are read: files, or the op's volume."""
    store = Store(data, read_only=True)
    for op in sorted({(name.environment, name.op) for name in changed}):
        of_op = {n: e for n, e in entries.items() if (n.environment, n.op) == op}
        volume = data / op[0] / f"{op[1]}{volumes.SUFFIX}"
        if volume.exists():
            files = {n.problem: e.to_bytes() for n, e in of_op.items()}
            trust.write_atomically(volume, volumes.bound(files), mode=0o644)
            continue
        for name in of_op.keys() & set(changed):
            place = store.path(name)
            trust.write_atomically(place, of_op[name].to_bytes(), mode=0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("revision", nargs="?", help="git's name of the tree before")
    parser.add_argument("--only", help="pattern of the variants to compare")
    parser.add_argument("--dry", action="store_true", help="only tell what would be")
    parser.add_argument("--data", type=pathlib.Path, default=knowledge.SHIPPED)
    parser.add_argument("--write", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        args.write.write_bytes(pickle.dumps(compiled(read(args.data).values())))
    elif args.revision:
        carry(args)
    else:
        parser.error("name the revision to compare with")


if __name__ == "__main__":
    main()
