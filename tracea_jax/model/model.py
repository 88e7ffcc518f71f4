"""A device's model: predicted times of choices, how far they are off, and its file.

    features -> trees -> log(time / reference), with the spread of the trees
             -> microseconds, and a standard deviation that held-out problems had

The reference of cuDNN is XLA's time, and that of a kernel of ours is the time of cuDNN
where that can run, else XLA's: what makes a problem slow for both of them need not be
predicted to choose between them. XLA's own time is relative to the roofline and what
the least problem took. There is one ensemble for all kernels of ours of an op, and one
for each peer. A decision predicts a few configs of ours, the portfolio of the problem's
kind, so that no space is built.
``benchmarks/survey/fit.py`` makes the files in ``data/models`` from rows of a survey;
``shipped`` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tracea_jax import roofline, variants
from tracea_jax.device import CpuDevice, Device
from tracea_jax.model import features
from tracea_jax.model.trees import ARRAYS, Ensemble
from tracea_jax.problem import Problem
from tracea_jax.variants import Config, Space

FORMAT = 1
XLA = "xla"
PEERS = (XLA, "cudnn")
OURS = "ours"
BARS = (0.97, 0.90)  # of the ratio of the best peer's time to that of a choice
SHARES = (0.01, 1 / 300)  # of choices that may be under each
_ANY = (-math.inf, math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Times of the configs of one variant.

    Attributes:
      log_us: natural logarithm of the microseconds of each.
      sigma: standard deviation of the logarithm of each time over the reference's.
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

    @property
    def widened(self) -> Regressor:
        """The same for other versions: as far off once more as on new problems."""
        return dataclasses.replace(self, noise=math.sqrt(2) * self.noise)

    def predict(self, rows: Mapping[str, Any], count: int) -> Prediction:
        members = self.trees.predict(rows, count)
        spread = members.std(axis=0)
        sigma = np.hypot(self.noise, self.gain * spread)
        return Prediction(log_us=members.mean(axis=0), sigma=sigma)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """What is decided of one kind of problem; see ``features.kind``.

    Attributes:
      margin: by how many standard deviations a choice must be faster than what the
        policy's rules choose.
      portfolio: configs by variant, as plain data, of which None stands for the
        variant's default; those that are legal for a problem are compared.
      facts: held-out regret of the model, and of the policy without it.
    """

    margin: float
    portfolio: Mapping[str, Sequence[Mapping[str, Any] | None]]
    facts: Mapping[str, Any]

    @property
    def is_within_bars(self) -> bool:
        """Whether no more held-out choices of the model are under the bars than may."""
        under = self.facts["model"]["under"]
        return all(seen <= most for seen, most in zip(under, SHARES, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpModel:
    """The part of a model for one op.

    Attributes:
      regressors: by the peer's name, and ``OURS``.
      overhead_us: what is added to the roofline.
      kinds: those for which the model was better on held-out problems than the policy
        without it.
      reach: least and greatest value of each feature of the problems of the survey.
      variants: of ours, which were measured.
      facts: where it comes from: problems, held-out regret, versions.
    """

    regressors: Mapping[str, Regressor]
    overhead_us: float
    kinds: Mapping[str, Kind]
    reach: Mapping[str, tuple[float, float]]
    variants: frozenset[str]
    facts: Mapping[str, Any]

    def covers(self, problem: Problem, device: Device) -> bool:
        """Whether such a problem was measured, and no feature is beyond those seen."""
        if features.kind(problem) not in self.kinds:
            return False
        numbers = _shared(problem, device)
        limits = ((value, self.reach.get(name)) for name, value in numbers.items())
        return all(of and of[0] <= value <= of[1] for value, of in limits)

    def is_of(self, installed: Mapping[str, str]) -> bool:
        """Whether rows of the survey have these versions, where both are known."""
        runs: Sequence[Mapping[str, str]] = self.facts.get("versions", ())
        return any(
            all(run.get(name, found) == found for name, found in installed.items())
            for run in runs
        )

    @property
    def widened(self) -> OpModel:
        """The same where other versions of the peers run than in the survey."""
        known = {name: of.widened for name, of in self.regressors.items()}
        return dataclasses.replace(self, regressors=known)

    @property
    def elsewhere(self) -> OpModel:
        """The same for devices that were not surveyed, of which less is certain.

        Kinds of problem that lost more than the bars allow are left out. The reach has
        any number of a device.
        """
        reach = {n: _ANY if n in features.OF_GPUS else r for n, r in self.reach.items()}
        kinds = {name: kind for name, kind in self.kinds.items() if kind.is_within_bars}
        return dataclasses.replace(self.widened, reach=reach, kinds=kinds)


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
        is_same = device_kind(device) == self.device
        return found is not None and is_same and found.covers(problem, device)

    def considered(self, problem: Problem, variant: str) -> tuple[Config | None, ...]:
        """Configs of a variant to predict; None stands for its default.

        Those that this version does not have are left out.
        """
        kind = self.ops[problem.op].kinds[features.kind(problem)]
        return _configs(kind, problem.op, variant)

    def knows(self, op: str, variant: str) -> bool:
        """Whether times of the variant are predicted."""
        known = self.ops[op]
        return variant in known.variants or variant in known.regressors

    def margin(self, problem: Problem) -> float:
        """See ``Kind.margin``."""
        return self.ops[problem.op].kinds[features.kind(problem)].margin

    def predict(
        self, problem: Problem, device: Device, spaces: Mapping[str, Space]
    ) -> dict[str, Prediction]:
        """Predictions for each config of the spaces, by variant.

        Variants that were never measured are left out.
        """
        op = self.ops[problem.op]
        shared = _shared(problem, device)
        found = self._peers(problem, device, [n for n in spaces if n in PEERS])
        reference = found[reference_of(found)]
        shared = {**shared, **features.of_reference(reference_of(found))}
        for name, space in spaces.items():
            if name in op.variants:
                own = features.of_space(problem, device, name, space)
                seen = op.regressors[OURS].predict({**shared, **own}, len(space))
                log_us = reference.log_us + seen.log_us
                found[name] = dataclasses.replace(seen, log_us=log_us)
        return {name: found[name] for name in spaces if name in found}

    def _peers(
        self, problem: Problem, device: Device, names: Sequence[str]
    ) -> dict[str, Prediction]:
        """Predictions of XLA, and of other peers of these that were measured."""
        op, shared = self.ops[problem.op], _shared(problem, device)
        known = [name for name in names if name in op.regressors and name != XLA]
        seen = {name: op.regressors[name].predict(shared, 1) for name in (XLA, *known)}
        xla = seen[XLA].log_us
        xla = xla + math.log(reference_us(problem, device, op.overhead_us))
        found = {
            name: Prediction(log_us=xla + seen[name].log_us, sigma=np.zeros(1))
            for name in known
        }
        # Uncertain is the quotient of both peers' times.
        sigma = seen[known[0]].sigma if known else np.zeros(1)
        return {XLA: Prediction(log_us=xla, sigma=sigma), **found}

    def with_versions(self, installed: Mapping[str, str]) -> Model:
        """The model where these versions are installed: peers may be others'."""
        ops = {
            name: op if op.is_of(installed) else op.widened
            for name, op in self.ops.items()
        }
        return dataclasses.replace(self, ops=ops)

    def on(self, device: Device) -> Model:
        """The model for a device that was not surveyed."""
        ops = {name: op.elsewhere for name, op in self.ops.items()}
        return dataclasses.replace(self, device=device_kind(device), ops=ops)

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


@functools.lru_cache(maxsize=16)  # whether a model covers a problem is asked before
def _shared(problem: Problem, device: Device) -> features.Numbers:
    return features.of_problem(problem, device)


@functools.lru_cache(maxsize=512)
def _configs(kind: Kind, op: str, variant: str) -> tuple[Config | None, ...]:
    found: list[Config | None] = []
    known = variants.get(op, variant)
    for data in kind.portfolio.get(variant, ()):
        with contextlib.suppress(ValueError):
            is_default = data is None
            found.append(
                None if is_default else variants.config_from_json(known, dict(data))
            )
    return tuple(found)


def reference_of(peers: Iterable[str]) -> str:
    """The peer that kernels of ours are compared with: the last one of ``PEERS``."""
    return max(peers, key=PEERS.index)


def reference_us(problem: Problem, device: Device, overhead_us: float) -> float:
    """What XLA's time is relative to."""
    return (roofline.floor_us(problem, device) or 0.0) + overhead_us


def device_kind(device: Device) -> str:
    """The kind of devices that one model is for; the name of its file."""
    if isinstance(device, CpuDevice):
        return f"cpu-{device.isa}"
    return "-".join(device.name.lower().split())


def _about(op: OpModel) -> dict[str, Any]:
    """Everything of an op's model but arrays, as plain data."""
    return {
        "overhead_us": op.overhead_us,
        "kinds": {
            name: {
                "margin": kind.margin,
                "portfolio": kind.portfolio,
                "facts": kind.facts,
            }
            for name, kind in sorted(op.kinds.items())
        },
        "reach": op.reach,
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
        kinds={name: Kind(**own) for name, own in about["kinds"].items()},
        reach=about["reach"],
        variants=frozenset(about["variants"]),
        facts=about["facts"],
    )
