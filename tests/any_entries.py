"""Entries of every kind, for hypothesis."""

from __future__ import annotations

import datetime

from hypothesis import strategies as st

from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.tuning.store import records
from tracea_jax.tuning.store.environment import Environment
from tracea_jax.tuning.store.records import Best, Entry, Observation

# What files may hold: text that does nothing to a terminal, integers of 64 bits.
CHARACTERS = st.characters(exclude_categories=("Cc", "Cf", "Cs", "Zl", "Zp"))
TEXT = st.text(CHARACTERS)
INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS = st.none() | INTEGERS | st.text(CHARACTERS, max_size=5)
SCALARS |= st.floats(-1e300, 1e300)
PLAIN = SCALARS | st.lists(SCALARS, max_size=3)
CONFIGS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=2)
TIMES = st.floats(1e-3, 1e9)
MEASURED = st.builds(
    Observation,
    variant=st.sampled_from(["gemm_cpu", "xla"]),
    config=CONFIGS,
    code=st.sampled_from(["", "0123", "4567"]),
    time_us=TIMES,
    repeats=st.integers(1, 5),
    cold_us=st.none() | TIMES,
    extra=st.dictionaries(TEXT, PLAIN, max_size=2),
)
FAILED = st.builds(
    Observation,
    variant=st.sampled_from(["gemm_cpu", "xla"]),
    config=CONFIGS,
    failure=st.sampled_from(records.FAILURES),
    message=st.text(),
)
OBSERVATIONS = st.lists(MEASURED | FAILED, max_size=4)
PLACES = st.builds(Environment, device=TEXT, arch=TEXT, units=st.integers(0, 1 << 20))
ENTRIES = st.builds(
    Entry,
    problem=st.builds(
        GemmProblem,
        m=st.integers(1, 1 << 40),
        n=st.integers(1, 99),
        k=st.integers(1, 99),
        epilogue=st.builds(Epilogue, residual=st.booleans()),
    ).map(GemmProblem.to_json),
    environment=PLACES,
    best=st.builds(
        Best,
        variant=TEXT,
        config=CONFIGS,
        code=st.sampled_from(["", "0123", "4567"]),
        time_us=TIMES,
        xla_us=TIMES,
        cold_us=st.none() | TIMES,
        goal=st.sampled_from(["latency", "throughput"]),
    ),
    observations=OBSERVATIONS.map(records.union),
    verified=st.dictionaries(TEXT, PLAIN, max_size=2),
    tuner=st.dictionaries(TEXT, PLAIN, max_size=2),
    written=st.datetimes().map(datetime.datetime.isoformat),
)
