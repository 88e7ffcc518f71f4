"""When the races of a whole program are held, and what is reported of them.

    before_search -> search -> after_search -> Whole

``campaign.run`` calls it in process 0; from then on ``verdicts`` knows the outcome. The
races themselves are in ``campaign.program``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tracea_jax import knowledge
from tracea_jax.campaign.executions import Program
from tracea_jax.campaign.keep import Undecided
from tracea_jax.campaign.needs import Needs, about
from tracea_jax.campaign.program import IS_PLAIN, Contest, Tell, own
from tracea_jax.campaign.whole import Whole
from tracea_jax.device import Device
from tracea_jax.options import Options, publish_epoch
from tracea_jax.schema import one_line
from tracea_jax.tuning import measure
from tracea_jax.tuning.store.records import Entry

TIMING = measure.Timing()
ROUNDS_SHARE = 0.1  # part of the budget that the rounds of a race take, or 11 rounds
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Races:
    """The races of a program around a search; what goes wrong there is a reason.

        with Races(...) as races:
            races.before_search()
            ...
            races.after_search(is_changed=True)

    Attributes:
      program: what races.
      device, settings: as of the tuning.
      budget_s: seconds for everything; may be infinite.
      clock: seconds since the tuning began.
      tell: as of ``Contest``.
      whole: the outcome by now.
      entry: where it is recorded; None if there was no race.
      is_interrupted: whether Ctrl-C ended a race.
    """

    program: Program
    device: Device
    settings: Options
    budget_s: float
    clock: Callable[[], float]
    tell: Tell
    whole: Whole = Whole(reason="interrupted")
    entry: Entry | None = None
    is_interrupted: bool = False
    _contest: Contest | None = own(lambda: None)
    _more: str = own(str)  # what was announced that the races need
    _begun_s: float = own(float)  # when the program was traced and plain compiled
    _stack: contextlib.ExitStack = own(contextlib.ExitStack)

    def __enter__(self) -> Races:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    @property
    def search_s(self) -> float:
        """Seconds for the search: all that ``after_search`` does not need."""
        reserve_s = 0.0 if self._contest is None else self._contest.reserve_s
        return self._left_s() - reserve_s

    def before_search(self) -> None:
        """Compiles plain, says what the races need, and holds the first if it can."""
        with self._reporting():
            self._see_answers()
            executions = self._stack.enter_context(self.program.opened())
            contest = Contest(
                program=executions,
                device=self.device,
                settings=self.settings,
                timing=self._timing,
                left_s=self._left_s,
                clock=self.clock,
                tell=self.tell,
            )
            contest.begin()
            self._begun_s = self.clock()
            self._announce(contest.needs)
            self._keep(contest.race_first())
            self._contest = contest
            if self.search_s <= 0:
                more = self._more or self._total(contest.needs)
                self._note(f"raced untuned: tuning it and racing again needs {more}")

    def after_search(self, *, is_changed: bool, is_interrupted: bool = False) -> None:
        """Holds the last race, and ends the progress.

        Args:
          is_changed: whether other configs run than before the search.
          is_interrupted: whether Ctrl-C ended the search: then there is no race.
        """
        contest = self._contest
        if contest is not None and not is_interrupted:
            with self._reporting():
                self._see_answers()
                self._keep(contest.race_last(is_changed=is_changed))
        elif contest is not None and self.entry is None:
            self.whole = Whole(reason="interrupted")
        elif contest is not None and is_changed:
            self._note("raced before the search, which was interrupted")
        _logger.info("%s as a %s", self.program.name, self.whole)
        kept = self.whole.verdict
        self.tell(
            phase="done",
            done=1,
            total=1,
            best_us=kept and kept.time_us,
            message=self.whole.reason,
            ratio=kept and kept.ratio,
        )

    @property
    def _timing(self) -> measure.Timing:
        final = TIMING.final
        race_s = min(final.race_s, ROUNDS_SHARE * self.budget_s)
        return dataclasses.replace(final, race_s=race_s)

    def _left_s(self) -> float:
        return self.budget_s - self.clock()

    def _see_answers(self) -> None:
        """Lets what is compiled from here on use what was tuned by now."""
        knowledge.refresh(self.settings)
        knowledge.trust_own(self.settings, self.device)
        publish_epoch()

    def _announce(self, needs: Needs) -> None:
        """Says at once if the budget does not suffice for both races.

        Raises:
          keep.Undecided: if it does not even suffice for one.
        """
        left_s = self._left_s()
        if left_s < needs.once_s:
            why = f"a race with plain needs {self._total(needs)}"
            self._say(f"{why}; only single problems are tuned")
            raise Undecided(why)
        if left_s < 2 * needs.once_s:
            self._more = self._total(needs)
            self._say(
                f"tuning it and racing again needs {self._more}; it races untuned"
            )

    def _total(self, needs: Needs) -> str:
        return f"{about(needs.after(self._begun_s))}, the budget is {self.budget_s:g} s"

    def _say(self, text: str) -> None:
        _logger.warning("%s: %s", self.program.name, text)
        self.tell(phase="compile", done=0, total=1, best_us=None, message=text)

    def _keep(self, entry: Entry | None) -> None:
        if entry is None:
            self.whole = Whole(reason=IS_PLAIN, note=self.whole.note)
        else:
            self.entry = entry
            found = Whole.of_entry(entry)
            self.whole = dataclasses.replace(found, note=self.whole.note)

    def _note(self, note: str) -> None:
        self.whole = dataclasses.replace(self.whole, note=note)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Records what ends a race as the reason, or as a note on the first."""
        why = ""
        try:
            yield
        except Undecided as e:
            why = str(e)
        except KeyboardInterrupt:
            why, self.is_interrupted = "interrupted", True
        except Exception as e:  # of the user's function, or for want of memory
            why = one_line(f"{type(e).__name__}: {e}")
        if why and self.entry is not None:
            self._note(f"raced before the search, not after it: {why}")
        elif why:
            self.whole = Whole(reason=why)
