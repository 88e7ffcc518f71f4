"""The search space of a variant: its legal configs as columns, in canonical order.

    grid(choices) -> columns -> rules -> Space

A rule is one formula for a single config and for columns of many configs, so that the
check of a config and the filter of a grid cannot disagree. The rules of each variant
are in its own module; which configs of a space are tried is decided in
``tuning.search``. Callers: all variants.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

Columns = dict[str, np.ndarray]
C = TypeVar("C")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A condition that refuses configs.

    Attributes:
      code: a word under which refused configs are counted.
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
      config_type: the variant's config class; a class without fields has one config.
      columns: for each field of ``config_type`` the values of all configs.
      derived: features of each config that follow from the fields and the problem.
      modelled_us: predicted time of each config in microseconds; None without a model.
      pruned: reason code -> configs of the full grid that were refused for it.
    """

    config_type: type[Any]
    columns: Columns
    derived: Columns = dataclasses.field(default_factory=dict[str, np.ndarray])
    modelled_us: np.ndarray | None = None
    pruned: dict[str, int] = dataclasses.field(default_factory=dict[str, int])

    @classmethod
    def of(cls, *configs: Any) -> Space:
        """The space of these configs, all of one type, in this order."""
        config_type = cast("type[Any]", type(configs[0]))
        names = [f.name for f in dataclasses.fields(config_type)]
        columns = {n: column([getattr(c, n) for c in configs]) for n in names}
        return cls(config_type=config_type, columns=columns)

    def __len__(self) -> int:
        return next((len(values) for values in self.columns.values()), 1)

    def config(self, index: int) -> Any:
        """The config number ``index``, in canonical order."""
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

    def only(self, kept: np.ndarray, code: str) -> Space:
        """The space of the configs that are kept.

        Args:
          kept: for each config whether it is.
          code: under which the others are counted.
        """
        if kept.all():
            return self
        us = self.modelled_us
        refused = self.pruned.get(code, 0) + int(np.count_nonzero(~kept))
        return dataclasses.replace(
            self,
            columns={name: values[kept] for name, values in self.columns.items()},
            derived={name: values[kept] for name, values in self.derived.items()},
            modelled_us=None if us is None else us[kept],
            pruned={**self.pruned, code: refused},
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


def where(condition: Any, value: Any, other: Any) -> Any:
    """``np.where`` of columns or of single values, whose types it cannot tell."""
    return cast("Any", np.where(condition, value, other))


def as_config(config_type: type[C], columns: Columns) -> C:
    """A config whose fields, and therefore whose properties, are whole columns."""
    fields: dict[str, Any] = columns
    return config_type(**fields)


def legal_columns(
    columns: Columns,
    config_type: type,
    rules: Iterable[Rule],
    problem: Any,
    device: Any,
) -> tuple[Columns, dict[str, int]]:
    """The configs that no rule refuses, and how many configs each rule refused.

    A config counts for the first rule that refuses it. Later rules see only the configs
    that are left, because the cost of a rule grows with their number.
    """
    pruned: dict[str, int] = {}
    for rule in rules:
        refused = rule.refuses(problem, as_config(config_type, columns), device)
        if count := int(np.count_nonzero(refused)):
            pruned[rule.code] = pruned.get(rule.code, 0) + count
            columns = {name: values[~refused] for name, values in columns.items()}
    return columns, pruned


def legal_space(
    columns: Columns,
    config_type: type,
    rules: Iterable[Rule],
    problem: Any,
    device: Any,
) -> Space:
    """The space of the configs that no rule refuses, without a model of their times."""
    legal, pruned = legal_columns(columns, config_type, rules, problem, device)
    return Space(config_type=config_type, columns=legal, pruned=pruned)


def column(values: Sequence[Any]) -> np.ndarray:
    """Values as an array of their own type if that is a plain one, else of objects."""
    kinds: set[type[Any]] = {type(value) for value in values}
    if len(kinds) == 1 and kinds <= {int, float, bool, str}:
        return np.array(values)
    array = np.empty(len(values), object)
    array[:] = values
    return array


def survivors(
    refusals: Iterable[tuple[str, np.ndarray]],
) -> tuple[np.ndarray, dict[str, int]]:
    """The configs that no reason refuses, and how many configs each reason refused.

    Args:
      refusals: (reason code, for each config whether the reason refuses it). A config
        counts for the first reason that refuses it.

    Returns:
      A mask of the configs that stay, and the counts that are not zero.
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
    """Replaces values by the first choice of the same effect.

    Args:
      values: one value of a field, or a column of values.
      choices: values of the field, the preferred ones first.
      effect: maps a value to its comparable effect on the problem; the effect is a
        column if it also depends on other fields.
    """
    wanted, chosen = effect(values), values
    for choice in reversed(choices):
        chosen = where(effect(choice) == wanted, choice, chosen)
    return chosen


def repeated(
    columns: Columns, preferred: Any, effects: Mapping[str, Callable[[Any], Any]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Marks configs that run exactly as another one, which differs in one field.

    Of the values of equal effect, the preferred config's value stays, else the
    smallest one.

    Args:
      columns: the configs.
      preferred: one config.
      effects: for each field the effect of its values, see ``representative``.

    Yields:
      (name of the field, for each config whether another one stands for it).
    """
    for name, effect in effects.items():
        values = columns[name]
        choices = (getattr(preferred, name), *np.unique(values).tolist())
        yield name, representative(values, choices, effect) != values


def check_choices(config: Any, choices: Mapping[str, Sequence[Any]]) -> None:
    """Raises ValueError unless each field has one of its choices."""
    for name, allowed in choices.items():
        value = getattr(config, name)
        if value not in allowed:
            listed = ", ".join(map(str, allowed))
            raise ValueError(f"{name}={value!r} must be one of {listed}")


def check_ranges(config: Any, ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises ValueError unless each field is an integer within its range."""
    for name, (least, most) in ranges.items():
        value = getattr(config, name)
        is_count = isinstance(value, int) and not isinstance(value, bool)
        if not (is_count and least <= value <= most):
            raise ValueError(
                f"{name}={value!r} must be an integer from {least} to {most}"
            )


def check_rules(rules: Iterable[Rule], problem: Any, config: Any, device: Any) -> None:
    """Raises ValueError with the sentence of the first rule that refuses the config."""
    if rule := first_refusal(rules, problem, config, device):
        raise ValueError(rule.why(problem, config, device))


def _scalar(value: Any) -> Any:
    return cast("Any", value).item() if isinstance(value, np.generic) else value
