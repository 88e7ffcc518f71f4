"""``TRACEA_LOG``, which lets the loggers below "tracea_jax" print.

Modules log by ``logging.getLogger(__name__)``: at level info each tuned answer, each
config that is refused, the race of each whole program, and what a cache could not use;
at level debug also each measurement, and how long compiling took. Without the variable
nothing is set up, as programs do that themselves. Callers: the package, when it is
imported, and ``options``, which reports a wrong value.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

VARIABLE = "TRACEA_LOG"
LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}


class Handler(logging.StreamHandler):
    """Prints to the error output, above the bar of a tuning that goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        if self._is_printed_elsewhere(record):
            return
        bars = sys.modules.get("tqdm")
        if bars is None:
            super().emit(record)
            return
        with bars.tqdm.external_write_mode(file=self.stream):
            super().emit(record)

    def _is_printed_elsewhere(self, record: logging.LogRecord) -> bool:
        """Tests whether a handler of the program's own prints the record there, too."""
        return any(
            isinstance(handler, logging.StreamHandler)
            and handler.stream is self.stream
            and record.levelno >= handler.level
            for handler in logging.getLogger().handlers
        )


def level(environ: Mapping[str, str]) -> int | None:
    """The level that the environment asks for; None if it asks for none.

    Raises:
      ValueError: on a value that is not valid.
    """
    name = environ.get(VARIABLE)
    if not name:
        return None
    if name not in LEVELS:
        raise ValueError(f"{VARIABLE}={name!r} must be one of {', '.join(LEVELS)}")
    return LEVELS[name]


def install(environ: Mapping[str, str]) -> None:
    """Sets the level, and adds a handler unless there is one of ours.

    Raises:
      ValueError: as ``level`` raises it.
    """
    wanted = level(environ)
    if wanted is None:
        return
    logger = logging.getLogger("tracea_jax")
    logger.setLevel(wanted)
    if not any(isinstance(h, Handler) for h in logger.handlers):
        handler = Handler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
        logger.addHandler(handler)
