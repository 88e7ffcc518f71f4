"""A device's model: predicted times of choices, how far they are off, and its file.

    features -> trees -> log2(time / baseline), with the spread of the trees
             -> microseconds, and a standard deviation that held-out problems had

The baseline is what a variant's own model says, and without one the roofline and what
the least problem took. There is one ensemble for all kernels of ours of an op, and one
for each peer: XLA, and cuDNN where it can run.
``benchmarks/survey/fit.py`` makes the files in ``data/models`` from rows of a survey.
``policy`` asks.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from tracea_jax import roofline
from tracea_jax.device import CpuDevice, Device
from tracea_jax.model import features
from tracea_jax.model.trees import ARRAYS, Ensemble
from tracea_jax.problem import Problem
from tracea_jax.variants import Space

DATA = pathlib.Path(__file__).parents[1] / "data" / "models"
FORMAT = 1
PEERS = ("xla", "cudnn")
OURS = "ours"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Times of the configs of one variant.

    Attributes:
      log_us: natural logarithm of the microseconds of each.
      sigma: standard deviation of each logarithm.
    """

    log_us: np.ndarray
    sigma: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Regressor:
    """Trees with their uncertainty: sigma^2 = noise^2 + (gain spread)^2.

    Attributes:
      trees: members that were fitted to different samples.
      noise, gain: from the errors on problems that were held out.
    """

    trees: Ensemble
    noise: float
    gain: float

    def predict(self, rows: Mapping[str, Any], count: int) -> Prediction:
        members = self.trees.predict(rows, count)
        spread = members.std(axis=0)
        sigma = np.hypot(self.noise, self.gain * spread)
        return Prediction(log_us=members.mean(axis=0), sigma=sigma)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpModel:
    """The part of a model for one op.

    Attributes:
      regressors: by the peer's name, and ``OURS``.
      overhead_us: what is added to the roofline.
      margin: by how many standard deviations a kernel of ours must be faster than a
        peer to be chosen.
      kinds: see ``features.kind``, which problems had.
      variants: of ours, which were measured.
      facts: where it comes from: problems, held-out regret, versions.
    """

    regressors: Mapping[str, Regressor]
    overhead_us: float
    margin: float
    kinds: frozenset[str]
    variants: frozenset[str]
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model of times on one kind of device.

    Attributes:
      device: as ``device_kind`` names it.
      ops: by the op's name.
    """

    device: str
    ops: Mapping[str, OpModel]

    def covers(self, problem: Problem, device: Device) -> bool:
        """Whether problems like this one were measured on such a device."""
        found = self.ops.get(problem.op)
        return (
            found is not None
            and device_kind(device) == self.device
            and features.kind(problem) in found.kinds
        )

    def predict(
        self, problem: Problem, device: Device, spaces: Mapping[str, Space]
    ) -> dict[str, Prediction]:
        """Predictions for each config of the spaces, by variant.

        Variants that were never measured are left out.
        """
        op = self.ops[problem.op]
        shared = features.of_problem(problem, device)
        found: dict[str, Prediction] = {}
        for name, space in spaces.items():
            if name in PEERS and name in op.regressors:
                seen = op.regressors[name].predict(shared, 1)
            elif name in op.variants:
                own = features.of_space(problem, device, name, space)
                seen = op.regressors[OURS].predict({**shared, **own}, len(space))
            else:
                continue
            baseline = np.log(baseline_us(problem, device, op.overhead_us, space))
            found[name] = dataclasses.replace(seen, log_us=seen.log_us + baseline)
        return found

    def to_bytes(self) -> bytes:
        """The content of the model's file; equal models have equal bytes."""
        arrays: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {"format": FORMAT, "device": self.device, "ops": {}}
        for name, op in sorted(self.ops.items()):
            about["ops"][name] = _about(op)
            for group, regressor in sorted(op.regressors.items()):
                for array in ARRAYS:
                    values = getattr(regressor.trees, array)
                    arrays[f"{name}/{group}/{array}"] = values
        text = json.dumps(about, sort_keys=True, indent=1)
        arrays["about"] = np.frombuffer(text.encode(), np.uint8)
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[reportArgumentType]
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Model:
        """The inverse of ``to_bytes``.

        Raises:
          ValueError: if another version wrote it.
        """
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            about = json.loads(file["about"].tobytes())
            if about["format"] != FORMAT:
                raise ValueError(f"a model of format {about['format']}, not {FORMAT}")
            ops = {name: _op_model(op, name, file) for name, op in about["ops"].items()}
        return cls(device=about["device"], ops=ops)


def baseline_us(
    problem: Problem, device: Device, overhead_us: float, space: Space
) -> float | np.ndarray:
    """Times that predictions are relative to: a variant's own model, if it has one."""
    if space.modelled_us is not None:
        return space.modelled_us
    return (roofline.floor_us(problem, device) or 0.0) + overhead_us


def device_kind(device: Device) -> str:
    """The kind of devices that one model is for; the name of its file."""
    if isinstance(device, CpuDevice):
        return f"cpu-{device.isa}"
    return "-".join(device.name.lower().split())


@functools.cache
def shipped(device: str) -> Model | None:
    """The model in the package for a kind of device, or None."""
    path = DATA / f"{device}.npz"
    return Model.from_bytes(path.read_bytes()) if path.exists() else None


def covering(problem: Problem, device: Device) -> Model | None:
    """The model that covers a problem on a device, or None."""
    if not features.knows(problem.op):
        return None
    model = shipped(device_kind(device))
    return model if model is not None and model.covers(problem, device) else None


def _about(op: OpModel) -> dict[str, Any]:
    """Everything of an op's model but arrays, as plain data."""
    return {
        "overhead_us": op.overhead_us,
        "margin": op.margin,
        "kinds": sorted(op.kinds),
        "variants": sorted(op.variants),
        "facts": dict(op.facts),
        "regressors": {
            group: {
                "names": list(r.trees.names),
                "scale": r.trees.scale,
                "noise": r.noise,
                "gain": r.gain,
            }
            for group, r in sorted(op.regressors.items())
        },
    }


def _op_model(about: dict[str, Any], op: str, file: Any) -> OpModel:
    def regressor(group: str, own: dict[str, Any]) -> Regressor:
        arrays = {array: file[f"{op}/{group}/{array}"] for array in ARRAYS}
        trees = Ensemble(names=tuple(own["names"]), scale=own["scale"], **arrays)
        return Regressor(trees=trees, noise=own["noise"], gain=own["gain"])

    return OpModel(
        regressors={g: regressor(g, own) for g, own in about["regressors"].items()},
        overhead_us=about["overhead_us"],
        margin=about["margin"],
        kinds=frozenset(about["kinds"]),
        variants=frozenset(about["variants"]),
        facts=about["facts"],
    )
