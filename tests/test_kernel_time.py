"""Kernel times: a profile is divided among the calls, or no times are given."""

from __future__ import annotations

import pytest

from tracea_jax.ops.common import kernel_time


def test_a_profile_that_lost_a_kernel_is_taken_again(monkeypatch):
    kernels = {"ours": [1000.0], "xla": [2000.0, 500.0]}
    calls = {name: (lambda name=name: name) for name in kernels}
    lost = [3]  # how many profiles of several calls lose their last kernel

    def profile(calls):
        found = [duration for call in calls for duration in kernels[call()]]
        if len(calls) > 1 and lost[0]:
            lost[0] -= 1
            return found[:-1]
        return found

    monkeypatch.setattr(kernel_time, "_profile", profile)
    with pytest.raises(kernel_time.ProfileError, match="saw 11 kernels, not 12"):
        kernel_time.kernel_times(calls, 2)
    lost[0] = 2
    times = kernel_time.kernel_times(calls, 2)
    assert times == {"ours": [1.0, 1.0], "xla": [2.5, 2.5]}


def test_calls_are_timed_after_themselves(monkeypatch):
    """Caches that another call filled do not affect a call's time."""
    kernels = {"first": [1000.0, 500.0], "second": [2000.0]}
    calls = {name: (lambda name=name: name) for name in kernels}

    def profile(calls):
        found, before = [], None
        for name in (call() for call in calls):
            slowdown = 1.0 if name == before else 3.0
            found += [slowdown * duration for duration in kernels[name]]
            before = name
        return found

    monkeypatch.setattr(kernel_time, "_profile", profile)
    times = kernel_time.kernel_times(calls, 3)
    assert times == {"first": [1.5] * 3, "second": [2.0] * 3}


def test_a_profiler_that_sees_no_kernels_tells_no_times(monkeypatch):
    """As where the driver lets only its owner look at counters."""
    monkeypatch.setattr(kernel_time, "_profile", lambda calls: [])
    with pytest.raises(kernel_time.ProfileError, match="saw 0 kernels"):
        kernel_time.kernel_times({"ours": lambda: 0, "xla": lambda: 0}, 2)


def test_a_profiler_in_use_is_told_from_a_call_that_fails():
    def profile_inside():
        with pytest.raises(kernel_time.ProfileError):
            kernel_time.profiled([])
        raise ValueError("illegal address")

    with pytest.raises(ValueError, match="illegal address"):
        kernel_time.profiled([profile_inside])


def test_a_profile_that_cannot_be_kept_is_no_fault_of_a_call(monkeypatch):
    stop = kernel_time.profiler.stop_trace

    def failing():
        stop()
        raise OSError("No space left on device")

    monkeypatch.setattr(kernel_time.profiler, "stop_trace", failing)
    with pytest.raises(kernel_time.ProfileError, match="No space left"):
        kernel_time.profiled([])
