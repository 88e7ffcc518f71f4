"""tracea survey: measure random problems on this machine.

What is measured is in ``tracea_jax.survey``. Caller: ``cli``.
"""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Callable
from typing import Any

from tracea_jax.cli.parser import INTERRUPTED


def add(commands: Any) -> None:
    """Adds the command."""
    text = "measure random problems: kernels of tracea_jax against XLA"
    survey = commands.add_parser("survey", help=text, description=text)
    survey.set_defaults(command=_run)
    survey.add_argument(
        "--minutes", type=float, default=10.0, help="for everything (%(default)g)"
    )
    survey.add_argument(
        "--op", nargs="+", action="extend", help="ops to survey; all by default"
    )
    survey.add_argument("--seed", type=int, default=0, help="of the random problems")
    survey.add_argument(
        "--out", metavar="DIRECTORY", help="of the rows; by default in the cache"
    )


def _run(args: argparse.Namespace) -> int:
    # Other processes measure, and need the memory of a GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tracea_jax.campaign.progress import showing
    from tracea_jax.options import current, local_device
    from tracea_jax.survey.run import OPS, survey

    if not args.minutes > 0:
        raise ValueError(f"--minutes {args.minutes:g}: there must be some time")
    if unknown := sorted({*(args.op or ())} - {*OPS}):
        raise ValueError(f"--op {unknown[0]} must be one of {', '.join(OPS)}")
    place = pathlib.Path(args.out) if args.out else current().directory / "survey"
    with showing(True) as told:
        found = survey(
            place,
            local_device(),
            budget_s=60 * args.minutes,
            ops=args.op or OPS,
            seed=args.seed,
            tell=_telling(told),
        )
    print(found)
    return INTERRUPTED if found.interrupted else 0


def _telling(told: Callable[..., None] | None) -> Callable[[Any], None]:
    """Callback that shows a survey on the bar of ``campaign.progress``."""
    if told is None:
        return lambda progress: None
    return lambda progress: told(
        phase=f"{progress.done} measured",
        done=0,
        total=1,
        best_us=None,
        message="",
        problem=progress.problem,
        share=progress.used,
        left_s=progress.left_s,
    )
