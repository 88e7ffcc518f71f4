"""The bar that ``tune`` shows while it works, in a terminal or a notebook.

The numbers come from ``campaign.watch``; reports at the end are printed elsewhere.
Callers: ``campaign.tune`` and the demo.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tracea_jax.campaign.text import compared
from tracea_jax.page import times

Told = Callable[..., None]  # with the fields of ``watch.Step`` as keywords
WHOLE = "whole program"  # in place of a problem's text

_FORMAT = "{percentage:3.0f}%|{bar:20}| {desc}"
_NOTEBOOK_FORMAT = "{percentage:3.0f}%|{bar}| {desc}"  # the width is the browser's


@contextlib.contextmanager
def showing(progress: bool | Told) -> Iterator[Told | None]:
    """The function to call at every step inside the block; None for no one.

    Args:
      progress: True for a bar, which only a terminal or a notebook shows; False for
        nothing; or the function to call.

    Raises:
      TypeError: on anything else.
    """
    if not isinstance(progress, bool):
        if not callable(progress):
            raise TypeError(f"{progress=} must be True, False or a function")
        yield progress
    elif progress and (_is_terminal() or _is_notebook()):
        with contextlib.closing(Bar()) as bar:
            yield bar
    else:
        yield None


class Bar:
    """One line that changes.

    45%|####     | 1/4 matmul 8x8x8 float32 nn: search 5/16, best 10.2 us, 0:12 left
    """

    def __init__(self) -> None:
        # Importing it looks for a notebook, so it must not come before one is there.
        with warnings.catch_warnings():
            # A notebook without widgets has the bar as text, which says enough.
            warnings.simplefilter("ignore")
            tqdm = importlib.import_module("tqdm.auto").tqdm
        self._bar: Any = tqdm(
            total=1.0,
            miniters=0,  # the text changes where the share does not
            bar_format=_NOTEBOOK_FORMAT if _is_notebook() else _FORMAT,
            **_width(),
        )
        self._phase = ""

    def __call__(
        self,
        *,
        phase: str,
        done: int,
        total: int,
        best_us: float | None,
        message: str,
        xla_us: float | None = None,
        ratio: float | None = None,
        problem: str = "",
        node: int = 0,
        nodes: int = 1,
        share: float | None = None,
        left_s: float | None = None,
    ) -> None:
        """Shows a step, unless one of the same phase was shown a moment ago.

        Args: see ``campaign.watch.Step``.
        """
        parts = [f"{phase} {done}/{total}" if total > 1 else phase]
        if best_us is not None:
            parts.append(f"best {times.microseconds(best_us)}")
        if best_us and xla_us and ratio is not None:
            name = "plain" if problem == WHOLE else "XLA"
            parts.append(compared(best_us, name, xla_us))
        if left_s is not None and phase != "done":
            parts.append(f"{_clock(left_s)} left")
        what = f"{node}/{nodes} {problem}" if nodes > 1 else problem
        text = ", ".join(part for part in (*parts, message) if part)
        self._bar.set_description_str(f"{what}: {text}" if what else text, False)
        share = done / max(total, 1) if share is None else share
        if phase == self._phase:
            self._bar.update(min(share, 1.0) - self._bar.n)
        else:  # shown at once: its first step may take a while
            self._phase, self._bar.n = phase, min(share, 1.0)
            self._bar.refresh()

    def close(self) -> None:
        """Leaves the line as the last step was."""
        self._bar.close()


def _width() -> dict[str, Any]:
    """The arguments of tqdm about the size of the terminal.

    The bar follows it. For a terminal without a size a usual one is assumed, as tqdm
    shows no bar there.
    """
    try:
        is_known = min(os.get_terminal_size(sys.stderr.fileno())) > 0
    except (AttributeError, OSError, ValueError):  # no terminal
        is_known = False
    if is_known or _is_notebook():
        return {"dynamic_ncols": True}
    size = shutil.get_terminal_size()
    return {"ncols": size.columns, "nrows": size.lines}


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _is_notebook() -> bool:
    """Returns whether this is a kernel of Jupyter, not IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _clock(seconds: float) -> str:
    """Minutes and seconds such as "1:05", with hours such as "1:00:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
