"""The native launcher with a lowered call, in new processes. No GPU.

XLA instantiates a handler when it compiles. The CUDA launcher's instantiate stage
touches no driver, so XLA runs that stage here, with all stages registered for the CPU.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import pathlib
import subprocess
import sys

import pytest
import sample_kernels
from processes import forked
from sample_kernels import KEY, elf

from tracea_jax.runtime import cubins
from tracea_jax.runtime.nvrtc import Cubin

INSTANTIATE = """
import json, pathlib, sys
import jax, jax.numpy as jnp
from tracea_jax import _native
from tracea_jax.runtime import launch
import numpy as np

jax.devices()  # a stateful CPU handler may only be registered after this
target = _native.ffi_targets()["tracea_cuda_launch_v1"]
name, state = target["state"]
jax.ffi.register_ffi_type(name, state, platform="cpu")
stages = {k: target["stages"][k] for k in ("instantiate", "execute")}
jax.ffi.register_ffi_target("tracea_cuda_launch_v1", stages, platform="cpu")

KEY, changes = json.load(sys.stdin)
launch.set_cubin_directory(pathlib.Path("store"))
x = jnp.zeros(8)
result = jax.ShapeDtypeStruct((8,), jnp.float32)
call = jax.ffi.ffi_call("tracea_cuda_launch_v1", result)
said = []
for change in changes:
    attributes = dict(abi=1, kernel_key=KEY, entry="scale", arch="sm_90a",
                      launch=np.array([1, 1, 1, 32, 1, 1, 1, 1, 1, 0]),
                      params=np.array([0, 0, 0, 1]))
    exec(change)
    try:
        jax.jit(lambda x: call(x, **attributes)).lower(x).compile()
        said.append("instantiated")
    except Exception as e:
        said.append(str(e))
print(json.dumps(said))
"""


def instantiate(directory: pathlib.Path, *changes: str) -> list[str]:
    """Compiles calls with changed attributes in one new process; what came of each."""
    done = subprocess.run(
        forked(INSTANTIATE, strict=False),
        input=json.dumps([KEY, changes]),
        capture_output=True,
        text=True,
        cwd=directory,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stored(code: Cubin) -> str:
    """The change of attributes that asks for a kernel in the store."""
    sha256 = hashlib.sha256(code.image).hexdigest()
    return f"attributes.update(kernel_key={code.key!r}, sha256={sha256!r})"


@pytest.mark.nvrtc
def test_a_stored_kernel_is_found_by_another_process(tmp_path):
    """If it is whole, and only by a program that says what it must be."""
    store = tmp_path / "store"
    kernel = sample_kernels.scale()
    other = dataclasses.replace(kernel, options=("-DOTHER",))
    whole, damaged = (cubins.get_or_compile(k, store) for k in (kernel, other))
    cubins.path(store, "sm_90a", damaged.key).write_bytes(damaged.image[:-1])
    unstated, passed_over, found = instantiate(
        tmp_path,
        f"attributes['kernel_key'] = {whole.key!r}",
        stored(damaged),
        stored(whole),
    )
    assert "FAILED_PRECONDITION" in unstated
    assert "does not state its sha256" in unstated
    assert "FAILED_PRECONDITION" in passed_over
    assert found == "instantiated"


REGISTER = f"_native.put_cubin({KEY!r}, {elf()!r})"
EMBED = f"attributes['cubin'] = {base64.b64encode(elf(b'?>~ any length')).decode()!r}"
# Changes, in one process and in this order, and what is said of each.
SAID = {
    "unknown": (
        "",
        ("FAILED_PRECONDITION", "scale", KEY, "TRACEA_CACHE_DIR", "jax.export")
        + (f"store/cubin/sm_90a/{KEY}.cubin",),
    ),
    "another interface": ("attributes['abi'] = 2", ("launch interface 2",)),
    "missing": ("del attributes['entry']", ("attribute entry is missing",)),
    "wrong type": (
        "attributes['abi'] = 1.0",
        ("attribute abi is missing or has the wrong",),
    ),
    "a path as key": (
        "attributes['kernel_key'] = '../../etc'",
        ("lower-case letters",),
    ),
    "a path as arch": ("attributes['arch'] = '/etc'", ("lower-case letters",)),
    "broken base64": ("attributes['cubin'] = 'AA*='", ("no compiled image",)),
    "embedded text": ("attributes['cubin'] = 'SGVsbG8='", ("is no cubin",)),
    "bad launch": ("attributes['launch'][0] = -1", ("grid dimension is -1",)),
    "embedded": (f"{EMBED}; attributes['kernel_key'] = 'e' * 64", ("instantiated",)),
    "registered": (REGISTER, ("instantiated",)),
    **{
        f"{len(params)} numbers of parameters": (
            f"attributes['params'] = np.array({params}, np.int64)",
            ("instantiated",),
        )
        for params in ([], [1, 1] * 64, [0, 63])
    },
}


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict[str, str]:
    changes = [change for change, _ in SAID.values()]
    answers = instantiate(tmp_path_factory.mktemp("empty"), *changes)
    return dict(zip(SAID, answers, strict=True))


@pytest.mark.parametrize("case", SAID)
def test_a_call_is_instantiated_or_refused_when_loaded(said, case):
    for part in SAID[case][1]:
        assert part in said[case]


def test_a_source_tree_says_how_to_install(tmp_path):
    script = "import sys; sys.modules['tracea_jax._native'] = None\n"
    script += "import tracea_jax.runtime.launch"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode != 0
    assert "no compiled extension" in done.stderr
    assert "pip install ." in done.stderr
