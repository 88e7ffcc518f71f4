"""Logging, and the part of it that TRACEA_LOG prints."""

from __future__ import annotations

import contextlib
import io
import logging
import re

import pytest
import synthetic_bench as synthetic
from processes import run_forked
from program_races import ARGUMENTS, Script, layers
from sample_kernels import scale
from synthetic_bench import Bench, Clock, choice

import tracea_jax as tracea
from tracea_jax import logs
from tracea_jax.campaign.progress import showing
from tracea_jax.options import current
from tracea_jax.runtime import nvrtc
from tracea_jax.tuning.measure import CandidateError

pytestmark = pytest.mark.once

PROBLEM = tracea.GemmProblem(m=16, n=24, k=8)


def lines(caplog, level=logging.INFO):
    return [r.getMessage() for r in caplog.records if r.levelno == level]


# --- what -----------------------------------------------------------------------------


def test_each_answer_and_each_refused_config_is_a_line(caplog):
    bench = Bench(Clock(), {choice(4): 40.0})

    def hook(now, c):
        if c == choice(5):
            raise CandidateError("compile_error", "no registers\nleft")

    bench.hook = hook
    caplog.set_level(logging.INFO, "tracea_jax")
    entry = synthetic.tune(bench)
    *refused, last = lines(caplog)
    (first,) = [line for line in refused if "is refused" in line]
    assert first == (
        f"{synthetic.PROBLEM}: {choice(5)} is refused: compile_error: "
        r"no registers\nleft"
    )
    assert (
        last == f"{synthetic.PROBLEM}: {entry.best}, {entry.tuner['evals']} evaluations"
    )
    text = "40.0 us, XLA 100.0 us, 2.50x"
    assert str(entry.best).endswith(text)


def test_each_measurement_is_a_line_at_level_debug(caplog):
    caplog.set_level(logging.DEBUG, "tracea_jax")
    entry = synthetic.tune(Bench(Clock(), {choice(4): 40.0}))
    measured = lines(caplog, logging.DEBUG)
    sampled = [o for o in entry.observations if o.failure is None]
    assert len(measured) == len(sampled)
    took = r"took 40\.0 us, compiled in \d+\.\d\d s"
    (line,) = [line for line in measured if f": {choice(4)} " in line]
    assert re.fullmatch(
        rf"{re.escape(f'{synthetic.PROBLEM}: {choice(4)}')} {took}", line
    )


def test_the_race_of_a_program_is_a_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tracea_jax")
    Script({None: 100.0, (): 70.0, ("conv2d",): 90.0}).install(monkeypatch)
    report = tracea.tune(layers, *ARGUMENTS)
    assert lines(caplog) == [f"layers as a {report.whole}"]
    assert "1.43x as fast as plain" in lines(caplog)[0]


def test_a_race_that_was_not_held_is_a_line(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "tracea_jax")
    Script({}).install(monkeypatch)
    with tracea.options(implementation="xla"):
        tracea.tune(layers, *ARGUMENTS)
    why = "not raced: options(implementation='xla') is set"
    assert lines(caplog) == [f"layers as a whole program: {why}"]


def test_a_file_that_is_set_aside_is_a_line(caplog):
    caplog.set_level(logging.INFO, "tracea_jax")
    tracea.tune(PROBLEM, effort="none", budget_s=0.2)
    (path,) = current().directory.glob("tuned/*/matmul/*.json")
    path.write_text("{")
    caplog.clear()
    with pytest.warns(RuntimeWarning, match="is damaged") as warned:
        tracea.tune(PROBLEM, effort="none", budget_s=0.2)
    assert str(warned[0].message) in lines(caplog)


@pytest.mark.nvrtc
def test_the_time_of_compiling_a_kernel_is_a_line(caplog):
    caplog.set_level(logging.DEBUG, "tracea_jax")
    kernel = scale()
    nvrtc.compile(kernel)
    (line,) = lines(caplog, logging.DEBUG)
    assert re.fullmatch(rf"scale for {kernel.arch} compiled in \d+\.\d\d s", line)


# --- TRACEA_LOG -----------------------------------------------------------------------

TOLD = """
    import io, logging, sys
    sys.stderr = io.StringIO()
    import tracea_jax
    logger = logging.getLogger("tracea_jax.tuning.tuner")
    logger.debug("detail")
    logger.info("answer")
    print([type(h).__name__ for h in logging.getLogger("tracea_jax").handlers])
    print(sys.stderr.getvalue(), end="")
"""


@pytest.mark.parametrize(
    ("level", "told"), [("info", ["answer"]), ("debug", ["detail", "answer"])]
)
def test_the_variable_prints_lines_of_its_level(level, told):
    handlers, *lines = run_forked(TOLD, TRACEA_LOG=level).splitlines()
    assert handlers == "['Handler']"
    start = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} tracea_jax\.tuning\.tuner"
    assert len(lines) == len(told)
    for line, text in zip(lines, told, strict=True):
        assert re.fullmatch(f"{start}: {text}", line)


BOTH = """
    import io, logging, sys
    sys.stderr = io.StringIO()
    import tracea_jax
    logging.basicConfig(level={level}, stream={stream})
    logging.getLogger("tracea_jax.tuning.tuner").info("answer")
    print(sys.stderr.getvalue(), end="")
"""


@pytest.mark.parametrize(
    ("level", "stream", "count"),
    [("10", "sys.stderr", 1), ("30", "sys.stderr", 1), ("10", "io.StringIO()", 1)],
)
def test_a_program_that_prints_logs_itself_has_each_line_once(level, stream, count):
    program = BOTH.format(level=level, stream=stream)
    assert run_forked(program, TRACEA_LOG="info").count("answer") == count


def test_without_the_variable_nothing_is_set_up():
    assert run_forked(TOLD, TRACEA_LOG="") == "[]\n"


def test_a_wrong_value_is_an_error_when_settings_are_used_first():
    program = """
        import tracea_jax as tracea
        try:
            tracea.tune(tracea.Graph())
        except ValueError as e:
            print(e)
    """
    message = "TRACEA_LOG='warning' must be one of info, debug\n"
    assert run_forked(program, TRACEA_LOG="warning") == message


@pytest.fixture
def logger():
    """The package's logger, as it was at first once the test is over."""
    logger = logging.getLogger("tracea_jax")
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


def test_one_handler_is_enough(logger):
    before = len(logger.handlers)
    logs.install({"TRACEA_LOG": "info"})
    logs.install({"TRACEA_LOG": "debug"})
    assert len(logger.handlers) == before + 1 and logger.level == logging.DEBUG


def test_a_line_stands_above_the_bar(logger, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    with contextlib.redirect_stderr(Terminal()) as stream, showing(True) as told:
        assert told is not None
        logs.install({"TRACEA_LOG": "info"})
        told(phase="race", done=1, total=4, best_us=None, message="")
        logger.info("a line")
        told(phase="done", done=1, total=1, best_us=None, message="")
    written = stream.getvalue().split("\r")
    (line,) = [text for text in written if text.endswith(": a line\n")]
    after = written[written.index(line) + 1]
    assert after.strip() == " 25%|#####               | race 1/4".strip()
    assert line.count("\n") == 1 and "%" not in line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
