"""The candidates of a search: the legal configs of all variants, as one matrix.

Spaces of one variant are in ``variants.space``; how a column becomes numbers is in
``encode``; which candidates are tried is decided in ``batches``. Callers: ``history``,
``tuning.tuner`` and ``tuning.session``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tracea_jax.policy import Choice, Decision
from tracea_jax.tuning.search.encode import codes, encode
from tracea_jax.tuning.store.records import identity
from tracea_jax.variants import Space


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Every choice worth measuring except XLA's, which takes part in every race anyway.

    Attributes:
      choices: n choices in canonical order.
      features: (n, d) in [0, 1], for the surrogate.
      codes: (n, p), equal integers where the config fields are equal.
      log_prior: logarithm of the modelled time of each choice; None if a variant has
        no model.
      pruned: ``Space.pruned`` of all spaces together.
      places: index of each choice by its identity.
    """

    choices: tuple[Choice, ...]
    features: np.ndarray
    codes: np.ndarray
    log_prior: np.ndarray | None
    pruned: dict[str, int]
    places: dict[str, int]

    @classmethod
    def of(cls, decision: Decision) -> Candidates:
        """The candidates that a decision leaves."""
        spaces = {n: s for n, s in decision.spaces.items() if n != "xla" and len(s)}
        choices = tuple(
            Choice(variant=name, config=config)
            for name, space in spaces.items()
            for config in space.configs()
        )
        pruned = [space.pruned for space in spaces.values()]
        return cls(
            choices=choices,
            features=_features(spaces, len(choices)),
            codes=_codes(spaces),
            log_prior=_log_prior(list(spaces.values())),
            pruned={code: count for counts in pruned for code, count in counts.items()},
            places={identity_of(choice): i for i, choice in enumerate(choices)},
        )

    def indices(self, choices: Sequence[Choice]) -> list[int]:
        """The indices of these choices; choices that are no candidates are left out."""
        places = (self.place(identity_of(choice)) for choice in choices)
        return [place for place in places if place is not None]

    def place(self, name: str) -> int | None:
        """The index of the choice of identity ``name``; None if it is no candidate."""
        return self.places.get(name)


def identity_of(choice: Choice) -> str:
    """The identity that observations of this choice have."""
    return identity(choice.variant, config_json(choice))


def config_json(choice: Choice) -> dict[str, Any]:
    """The choice's config as plain data."""
    config = choice.config
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}


def _features(spaces: Mapping[str, Space], count: int) -> np.ndarray:
    if not spaces:
        return np.empty((count, 0))
    if len(spaces) == 1:
        (space,) = spaces.values()
        columns = {**space.columns, **space.derived}
        return encode(columns) if columns else np.empty((count, 0))
    names = [name for name, space in spaces.items() for _ in range(len(space))]
    parts = [np.array(names)[:, None] == sorted(spaces)]
    start = 0
    for space in spaces.values():
        columns = {**space.columns, **space.derived}
        own = encode(columns) if columns else np.empty((len(space), 0))
        # Other variants lack these fields; their rows get the middle of the range.
        rows = np.full((count, own.shape[1]), 0.5)
        rows[start : start + len(space)] = own
        parts.append(rows)
        start += len(space)
    return np.concatenate(parts, axis=1).astype(np.float64)


def _codes(spaces: Mapping[str, Space]) -> np.ndarray:
    """Codes of each variant's fields, offset so that two variants share no code."""
    width = 1 + max((len(s.columns) for s in spaces.values()), default=0)
    parts: list[np.ndarray] = [np.empty((0, width), dtype=int)]
    for number, space in enumerate(spaces.values()):
        part = np.full((len(space), width), number)
        if space.columns:
            own = codes(space.columns)
            part[:, 1 : 1 + own.shape[1]] = own * len(spaces) + number
        parts.append(part)
    return np.concatenate(parts)


def _log_prior(spaces: Sequence[Space]) -> np.ndarray | None:
    modelled = [s.modelled_us for s in spaces if s.modelled_us is not None]
    if not modelled or len(modelled) < len(spaces):
        return None
    return np.log(np.concatenate(modelled))
