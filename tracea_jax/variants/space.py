"""The search space of a variant: its legal configs as columns, in canonical order.

    grid(choices) -> columns -> rules -> Space

A rule is one formula for a single config and for columns of many, so that the check of
a config and the filter of a grid cannot disagree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Columns = dict[str, np.ndarray]
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition that refuses configs.

    Attributes:
      code: a word to count by.
      refuses: (problem, config, device) -> bool; given a config whose fields are
        columns, an array of bools.
      why: (problem, config, device) -> the sentence why this one config is refused.
    """

    code: str
    refuses: Callable[[Any, Any, Any], Any]
    why: Callable[[Any, Any, Any], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Space:
    """The legal configs of one variant for one problem.

    Attributes:
      config_type: the variant's own; without fields it has one config.
      columns: a value of each config, for each field of ``config_type``.
      derived: features of each config that follow from the fields and the problem.
      modelled_us: predicted time of each config in microseconds; None without a model.
      pruned: reason code -> configs of the full grid that were refused for it.
    """

    config_type: type
    columns: Columns
    derived: Columns = dataclasses.field(default_factory=dict)
    modelled_us: np.ndarray | None = None
    pruned: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, *configs: Any) -> Space:
        """The space of these configs, all of one type, in this order."""
        config_type = type(configs[0])
        names = [f.name for f in dataclasses.fields(config_type)]
        columns = {n: column([getattr(c, n) for c in configs]) for n in names}
        return cls(config_type=config_type, columns=columns)

    def __len__(self) -> int:
        return next((len(values) for values in self.columns.values()), 1)

    def config(self, index: int) -> Any:
        """The config of this number."""
        fields = {name: values[index] for name, values in self.columns.items()}
        return self.config_type(**{n: _scalar(value) for n, value in fields.items()})

    def configs(self) -> tuple[Any, ...]:
        """All configs, in canonical order."""
        if not self.columns:
            return (self.config_type(),)
        rows = zip(*(values.tolist() for values in self.columns.values()), strict=True)
        return tuple(
            self.config_type(**dict(zip(self.columns, r, strict=True))) for r in rows
        )

    def index(self, config: Any) -> int | None:
        """The number of a config; None if it is not in the space."""
        if type(config) is not self.config_type:
            return None
        equal = np.ones(len(self), bool)
        for name, values in self.columns.items():
            equal &= values == column([getattr(config, name)])
        return int(equal.argmax()) if equal.any() else None

    def __str__(self) -> str:
        counts = ", ".join(f"{code} {count}" for code, count in self.pruned.items())
        configs = "1 legal config" if len(self) == 1 else f"{len(self)} legal configs"
        return configs + (f"; refused: {counts}" if counts else "")


def grid(**choices: Sequence[Any]) -> Columns:
    """Every combination of the choices as columns; the last choice changes fastest."""
    columns = [column(values) for values in choices.values()]
    mesh = np.meshgrid(*columns, indexing="ij")
    return {name: axis.ravel() for name, axis in zip(choices, mesh, strict=True)}


def as_config(config_type: type[C], columns: Columns) -> C:
    """Columns in the place of a config's numbers; its properties are columns too."""
    fields: dict[str, Any] = columns
    return config_type(**fields)


def legal_columns(
    columns: Columns,
    config_type: type,
    rules: Iterable[Rule],
    problem: Any,
    device: Any,
) -> tuple[Columns, dict[str, int]]:
    """The configs that no rule refuses, and how many were refused for what.

    A config counts for the first rule that refuses it. Later ones see only what is
    left, as they cost in proportion to that.
    """
    pruned: dict[str, int] = {}
    for rule in rules:
        refused = rule.refuses(problem, as_config(config_type, columns), device)
        if count := int(np.count_nonzero(refused)):
            pruned[rule.code] = pruned.get(rule.code, 0) + count
            columns = {name: values[~refused] for name, values in columns.items()}
    return columns, pruned


def column(values: Sequence[Any]) -> np.ndarray:
    """Values as an array of their own type, or of objects if that is no plain one."""
    kinds = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {int, float, bool, str}:
        return np.array(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def survivors(
    refusals: Iterable[tuple[str, np.ndarray]],
) -> tuple[np.ndarray, dict[str, int]]:
    """Which configs nothing refuses, and how many each code refused.

    Args:
      refusals: (reason code, whether it refuses each config). A config counts for the
        first one that refuses it.

    Returns:
      A mask of the configs that stay, and the counts without the zeros.
    """
    alive: np.ndarray | None = None
    pruned: dict[str, int] = {}
    for code, refused in refusals:
        alive = np.ones(len(refused), bool) if alive is None else alive
        if count := int(np.count_nonzero(alive & refused)):
            pruned[code] = pruned.get(code, 0) + count
        alive &= ~refused
    if alive is None:
        raise ValueError(
            "there must be at least one rule, to tell the number of configs"
        )
    return alive, pruned


def first_refusal(
    rules: Iterable[Rule], problem: Any, config: Any, device: Any
) -> Rule | None:
    """The first rule that refuses this one config, or None."""
    return next((r for r in rules if r.refuses(problem, config, device)), None)


def representative(
    values: Any, choices: Sequence[Any], effect: Callable[[Any], Any]
) -> Any:
    """The value that stands for each one: the first choice of the same effect.

    Args:
      values: of a field, one or a column.
      choices: values of the field, the preferred ones first.
      effect: what a value comes to for the problem, comparable; a column if it depends
        on other fields.
    """
    wanted, chosen = effect(values), values
    for choice in reversed(choices):
        chosen = np.where(effect(choice) == wanted, choice, chosen)
    return chosen


def repeated(
    columns: Columns, preferred: Any, effects: Mapping[str, Callable[[Any], Any]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Which configs run exactly as another one, by the field that makes no difference.

    Of those the preferred config's value stands for the others, else the smallest.

    Args:
      columns: the configs.
      preferred: one config.
      effects: for each field what a value of it comes to, see ``representative``.
    """
    for name, effect in effects.items():
        values = columns[name]
        choices = (getattr(preferred, name), *np.unique(values).tolist())
        yield name, representative(values, choices, effect) != values


def check_choices(config: Any, choices: Mapping[str, Sequence[Any]]) -> None:
    """Raises ValueError unless the fields have one of their choices each."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ValueError(f"{name}={value!r} must be one of {listed}")


def check_ranges(config: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises ValueError unless the fields are integers from a least to a most."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not (is_count and least <= value <= most):
            raise ValueError(
                f"{name}={value!r} must be an integer from {least} to {most}"
            )


def _scalar(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
