"""The progress that long commands print while they work.

The numbers come from ``campaign.watch``; reports at the end are printed elsewhere.
Callers: ``tracea tune`` (``cli.tuning``) and ``tracea demo`` (``cli``).
"""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

_TERMINAL_S = 0.1  # between two changes of the line on a terminal
_LINE_S = 3.0  # between two lines in a file
_BAR = 20  # characters


class Progress:
    """Prints progress: one changing line on a terminal, else a line now and then.

    [#####---------------] 1/4 matmul 64x64x64 float32 nn: sweep 5/16, best 10.2 us,
    1.31x XLA, 0:12 left
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._last_s: float | None = None
        self._width = 0

    def __call__(
        self,
        *,
        phase: str,
        done: int,
        total: int,
        best_us: float | None,
        message: str,
        xla_us: float | None = None,
        problem: str = "",
        node: int = 0,
        nodes: int = 1,
        share: float | None = None,
        left_s: float | None = None,
    ) -> None:
        """Prints a step, unless the last print was a moment ago.

        Args: see ``campaign.watch.Step``.
        """
        now = time.monotonic()
        pause = _TERMINAL_S if self._stream.isatty() else _LINE_S
        is_last = phase == "done" and node == nodes
        if self._last_s is not None and now - self._last_s < pause and not is_last:
            return
        self._last_s = now
        steps = f"{phase} {done}/{total}" if total > 1 else phase
        parts = [steps, *_best(best_us, xla_us)]
        if left_s is not None and phase != "done":
            parts.append(f"{_clock(left_s)} left")
        text = ", ".join(part for part in (*parts, message) if part)
        where = f"{node}/{nodes} {problem}: " if nodes > 1 else ""
        share = done / max(total, 1) if share is None else share
        self._write(
            _bar(share) + where + text if self._stream.isatty() else where + text
        )

    def _write(self, line: str) -> None:
        if self._stream.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line.ljust(self._width)}", end="", file=self._stream, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the changing line."""
        if self._width:
            print(file=self._stream)
            self._width = 0


def _best(best_us: float | None, xla_us: float | None) -> list[str]:
    if best_us is None:
        return []
    best = [f"best {best_us:.1f} us"]
    return best if xla_us is None else [*best, f"{xla_us / best_us:.2f}x XLA"]


def _clock(seconds: float) -> str:
    """Minutes and seconds such as "1:05", with hours such as "1:00:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bar(share: float) -> str:
    filled = round(_BAR * min(share, 1.0))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}] "
