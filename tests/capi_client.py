"""libtracea from Python by ctypes: for machines that have no compiler."""

from __future__ import annotations

import ctypes
import pathlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from tracea_jax.bundle.arrays import DTYPES
from tracea_jax.bundle.installation import Library

PLATFORMS = {"cpu": 0, "cuda": 1}


class Device(ctypes.Structure):
    _fields_ = [("platform", ctypes.c_int32), ("ordinal", ctypes.c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("rank", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("device", Device),
    ]


class Conv2dOptions(ctypes.Structure):
    _fields_ = [
        ("stride", ctypes.c_int32 * 2),
        ("dilation", ctypes.c_int32 * 2),
        ("padding", ctypes.c_int32 * 2),
        ("groups", ctypes.c_int32),
        ("activation", ctypes.c_int32),
    ]


class AttentionOptions(ctypes.Structure):
    _fields_ = [("scale", ctypes.c_float), ("is_causal", ctypes.c_int32)]


class Failed(RuntimeError):
    """A call that failed, with its status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Graph:
    """A bundle, loaded."""

    def __init__(self, bundle: pathlib.Path, platform: str) -> None:
        self._library = ctypes.CDLL(str(Library.installed().file))
        self._library.tracea_last_error.restype = ctypes.c_char_p
        self._library.tracea_graph_workspace_bytes.restype = ctypes.c_size_t
        self._device = Device(PLATFORMS[platform], 0)
        self._context, self._graph = ctypes.c_void_p(), ctypes.c_void_p()
        lib = self._library
        self._check(lib.tracea_context_create(self._device, 2, self._at("_context")))
        path = str(bundle).encode()
        self._check(lib.tracea_graph_load(self._context, path, self._at("_graph")))

    def _at(self, name: str) -> object:
        return ctypes.byref(getattr(self, name))

    def _check(self, status: int) -> None:
        if status:
            raise Failed(status, self._library.tracea_last_error().decode())

    def __call__(
        self, inputs: Sequence[np.ndarray], like: np.ndarray, threads: int = 1
    ) -> list[np.ndarray]:
        """The first output, as each of some threads that run at once computes it."""
        results: list[np.ndarray | Exception] = []

        def work() -> None:
            try:
                results.append(self.run(inputs, [like])[0])
            except Exception as e:
                results.append(e)

        all_threads = [threading.Thread(target=work) for _ in range(threads)]
        for thread in all_threads:
            thread.start()
        for thread in all_threads:
            thread.join()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [result for result in results if isinstance(result, np.ndarray)]

    def run(
        self, inputs: Sequence[np.ndarray], likes: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """All outputs, with the shapes and dtypes of others."""
        lib, outs = self._library, [np.empty_like(like) for like in likes]
        given = [self._tensor(x) for x in inputs]
        taken = [self._tensor(x) for x in outs]
        size = lib.tracea_graph_workspace_bytes(self._graph)
        workspace = self._allocate(size)
        for x, tensor in zip(inputs, given, strict=True):
            self._copy(tensor.data, x.ctypes.data, x.nbytes)
        self._check(
            lib.tracea_graph_run(
                *(self._graph, (Tensor * len(given))(*given)),
                *(ctypes.c_size_t(len(given)), (Tensor * len(taken))(*taken)),
                *(ctypes.c_size_t(len(taken)), workspace, ctypes.c_size_t(size), None),
            )
        )
        for x, tensor in zip(outs, taken, strict=True):
            self._copy(x.ctypes.data, tensor.data, x.nbytes)
        arrays = [ctypes.c_void_p(x.data) for x in (*given, *taken)]
        for memory in (workspace, *arrays):
            self._check(lib.tracea_free(self._context, memory))
        return outs

    def direct(
        self,
        function: str,
        operands: Sequence[np.ndarray | None],
        options: Any,
        like: np.ndarray,
    ) -> np.ndarray:
        """A single operation, by a kernel that the bundle brought."""
        out = np.empty_like(like)
        given = [None if x is None else self._tensor(x) for x in operands]
        taken = self._tensor(out)
        for x, tensor in zip(operands, given, strict=True):
            if x is not None and tensor is not None:
                self._copy(tensor.data, x.ctypes.data, x.nbytes)
        call = getattr(self._library, function)
        pointers = [None if x is None else ctypes.byref(x) for x in given]
        self._check(call(self._context, *pointers, options, ctypes.byref(taken), None))
        self._copy(out.ctypes.data, taken.data, out.nbytes)
        for tensor in (*given, taken):
            if tensor is not None:
                memory = ctypes.c_void_p(tensor.data)
                self._check(self._library.tracea_free(self._context, memory))
        return out

    def _allocate(self, size: int) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        self._check(
            self._library.tracea_allocate(
                self._context, ctypes.c_size_t(size), ctypes.byref(memory)
            )
        )
        return memory

    def _tensor(self, like: np.ndarray) -> Tensor:
        shape = (ctypes.c_int64 * like.ndim)(*like.shape)
        dtype = DTYPES.index(like.dtype.name)
        data = self._allocate(like.nbytes)
        return Tensor(data, shape, None, like.ndim, dtype, self._device)

    def _copy(self, to: int, source: int, size: int) -> None:
        places = ctypes.c_void_p(to), ctypes.c_void_p(source)
        lib = self._library
        self._check(
            lib.tracea_copy(self._context, *places, ctypes.c_size_t(size), None)
        )
        self._check(lib.tracea_synchronize(self._context, None))

    def close(self) -> None:
        """Gives everything back."""
        self._library.tracea_graph_destroy(self._graph)
        self._library.tracea_context_destroy(self._context)
