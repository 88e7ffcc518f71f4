"""Measured answers on this machine, and how more are measured.

known  -> the ``Knowledge`` that answers now
agreed -> the same, once all processes of a program have equal knowledge
tune   -> a new entry, and new knowledge for what is lowered from here on

What an answer is made of belongs to ``tuning.answers``; ``dispatch``, ``campaign`` and
``doctor`` ask here.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.core import eval_context

from tracea_jax import catalogue, policy, variants
from tracea_jax._compat import KeyValueStore, key_value_store, linearize_hook
from tracea_jax.device import CudaDevice, Device
from tracea_jax.diagnosis import diagnose
from tracea_jax.options import Options, current, device_here, publish_epoch
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.runtime import cubins
from tracea_jax.tuning import measure, tuner
from tracea_jax.tuning.agreement import Agreement
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.lab.ahead import kernels_of
from tracea_jax.tuning.lab.child import FACTORY as CHILD_FACTORY
from tracea_jax.tuning.lab.child import ChildLab
from tracea_jax.tuning.lab.local import Lab, LabError, LocalLab
from tracea_jax.tuning.store import exchange
from tracea_jax.tuning.store.records import Entry

SHIPPED = pathlib.Path(__file__).parent / "data" / "tuned"

# ---- what is known -------------------------------------------------------------------

# By the user's cache and the shared ones.
_known: dict[tuple[pathlib.Path, tuple[pathlib.Path, ...]], Knowledge] = {}


def known(settings: Options) -> Knowledge:
    """The knowledge that answers now."""
    places = settings.directory, settings.shared
    if places not in _known:
        # setdefault: threads that come here at once get the same knowledge.
        made = Knowledge(settings.directory, shipped=(SHIPPED,), shared=settings.shared)
        return _known.setdefault(places, made)
    return _known[places]


def agreed(settings: Options, device: Device) -> Knowledge:
    """The knowledge that answers now, if all processes have equal knowledge.

    Raises:
      agreement.Disagreement: if they have not.
    """
    own = known(settings)
    compared = _compared.setdefault(own, set())
    if device not in compared:
        if (agreement := _agreement()) is not None:
            agreement.check(device.platform, own.digest(device))
        compared.add(device)
    return own


def trust_own(settings: Options, device: Device) -> None:
    """Lets this process answer alone until ``refresh``: others wait for it, or none do.

    For what one process compiles and runs by itself.
    """
    _compared.setdefault(known(settings), set()).add(device)


# Devices whose answers were compared with those of the other processes.
_compared: weakref.WeakKeyDictionary[Knowledge, set[Device]] = (
    weakref.WeakKeyDictionary()
)


def _agreement() -> Agreement | None:
    """Agreement of this process with the others; None if there are none."""
    if jax.process_count() == 1:
        return None
    store = key_value_store()
    return None if store is None else _agreement_over(store)


@functools.cache  # one for each coordinator: it counts what was agreed on
def _agreement_over(store: KeyValueStore) -> Agreement:
    return Agreement(store, jax.process_index())


def refresh(settings: Options) -> None:
    """Lets problems lowered from here on be answered from what is recorded by now."""
    _known.pop((settings.directory, settings.shared), None)


# ---- how more gets known -------------------------------------------------------------


def may_tune(problem: Problem, device: Device) -> bool:
    """True if measuring now is safe: there is one process, and the device is here."""
    alone = jax.process_count() == 1
    return alone and device == device_here(device.platform)


def tune(
    problem: Problem,
    device: Device,
    *,
    settings: Options | None = None,
    publish: bool = False,
    **search: Any,
) -> Entry:
    """Measures the problem's candidates on this machine and keeps the best.

    Args:
      problem, device: what to tune; the device must be the local one. Problems that
        its variants are made of are tuned first, each by the same search, unless they
        were.
      settings: where the cache is.
      publish: whether functions that are already jitted shall see the result.
      **search: effort, budget_s, seed, goal, progress of ``tuner.Tuning``.

    In a program of several processes all must call this; process 0 tunes for them.

    Raises:
      ValueError: if the device is not the local one.
    """
    settings = settings or current()
    check_local(device)
    entries = by_process_0(
        lambda: _tuned(problem, device, settings, search),
        settings,
        search.get("progress"),
    )
    refresh(settings)
    if publish:
        publish_epoch()
    return entries[-1]


def check_local(device: Device) -> None:
    """Raises ValueError unless the device is one of this machine's."""
    if device != (local := device_here(device.platform)):
        raise ValueError(f"only the local device can be tuned, {local}; not {device}")


def _tuned(
    problem: Problem, device: Device, settings: Options, search: dict[str, Any]
) -> list[Entry]:
    """Tunes the parts that are not tuned yet, then the problem."""
    entries = []
    for part in variants.parts(problem):
        answer = known(settings).lookup(
            part, device, deterministic=settings.determinism
        )
        if answer is None or not answer.is_exact:
            entries += _tuned(part, device, settings, search)
    with (
        undisturbed(),
        contextlib.closing(open_lab(device, problem, settings=settings)) as lab,
    ):
        entry = tuner.finished(
            tuning(problem, device, settings=settings, lab=lab, **search)
        )
    tidy([entry], device, settings)
    refresh(settings)
    return [*entries, entry]


def tidy(entries: Iterable[Entry], device: Device, settings: Options) -> None:
    """Removes compiled kernels beyond the limit, the answers of these entries last."""
    for entry in entries:
        choice = legal_choice(
            entry.best.variant,
            entry.best.config,
            problem_from_json(entry.problem),
            device,
        )
        if isinstance(choice, policy.Choice):
            for kernel in kernels_of(problem_from_json(entry.problem), choice, device):
                cubins.mark_winner(settings.directory, kernel)
    cubins.collect(settings.directory, settings.cubin_limit)


def tuning(
    problem: Problem,
    device: Device,
    *,
    lab: Lab,
    settings: Options | None = None,
    **search: Any,
) -> tuner.Tuning:
    """A problem ready to be tuned; ``search`` is the rest of ``tuner.Tuning``'s."""
    settings = settings or current()
    diagnosis = diagnose(problem, device, settings.determinism)
    return tuner.Tuning(
        problem,
        diagnosis,
        policy.decide(diagnosis),
        lab,
        known(settings),
        device,
        **search,
    )


def open_lab(
    device: Device,
    problem: Problem,
    *,
    settings: Options | None = None,
    timing: measure.Timing | None = None,
) -> Lab:
    """Lab that measures choices; the caller closes it.

    On a GPU that is a child process, as an illegal access ends a process's use of it;
    or this process, if the GPU admits no second one.

    Args:
      device: the local device.
      problem: one of those to be measured, to try the child with.
      settings: where the cache is.
      timing: the measuring protocol.
    """
    directory = (settings or current()).directory
    exclusive = functools.partial(measure.exclusive, directory, device)
    if isinstance(device, CudaDevice):
        x64 = str(int(jax.config.read("jax_enable_x64")))
        child = ChildLab(
            CHILD_FACTORY,
            device,
            timing,
            directory=directory,
            # What may be measured was decided here, by the settings of this process.
            environment={"JAX_ENABLE_X64": x64, "TRACEA_DETERMINISTIC": "false"},
            exclusive=exclusive,
        )
        try:
            child.start(problem)
            return child
        except LabError as e:
            child.close()
            message = f"measuring in this process, where a crash would end it: {e}"
            warnings.warn(message, stacklevel=2)
    return LocalLab(bench_of, device, timing, exclusive=exclusive)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Measuring in the midst of a program: neither traced nor checked with it.

    A program that is differentiated asks for plans while JAX traces it; and what it
    forbids or checks (transfers, NaN, compiled code) is meant for its own arrays. A
    choice that failed because of that would be remembered as one that does not work.
    """
    with (
        eval_context(),
        linearize_hook(None),
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def bench_of(problem: Problem, device: Device) -> measure.Bench:
    """The bench that measures and verifies the choices of a problem."""
    return catalogue.get(problem.op).bench(problem, device)


def by_process_0(
    tune: Callable[[], list[Entry]],
    settings: Options,
    progress: tuner.Progress | None = None,
) -> list[Entry]:
    """The entries that ``tune`` returns in process 0, which alone calls it.

    The other processes wait and keep the entries in memory, so that all answer alike.
    A program of one process just tunes.

    Raises:
      agreement.Disagreement: in the others, if the tuning failed.
    """
    if (agreement := _agreement()) is None:
        return tune()

    def on_wait() -> None:
        if progress is not None:
            message = "process 0 is tuning"
            progress(phase="wait", done=0, total=1, best_us=None, message=message)

    data = agreement.share(lambda: exchange.pack(tune()), on_wait)
    entries = exchange.unpack(data)
    if jax.process_index() != 0:
        for entry in entries:
            known(settings).own.hold(entry)
    return list(entries)
