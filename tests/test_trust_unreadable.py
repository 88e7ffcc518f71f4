"""Files that only root can read or write cost other users a warning, and no more."""

from __future__ import annotations

import pytest
from synthetic_bench import entry, measured
from trusted import KEY, as_nobody, cubin, needs_root, posix, save_kernel

from tracea_jax.runtime import cubins as kernels
from tracea_jax.tuning.answers.knowledge import Knowledge

pytestmark = [posix, pytest.mark.usefixtures("nothing_warned")]


@needs_root
def test_what_root_made_serves_everybody_who_may_read_it(public):
    Knowledge(public).own.record(entry())
    save_kernel(public)
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    program = """if True:
        import pathlib, sys
        from synthetic_bench import PROBLEM, found
        from tracea_jax.runtime import cubins
        from tracea_jax.tuning.answers.knowledge import Knowledge
        directory = pathlib.Path(sys.argv[1])
        assert cubins.load(directory, "sm_90a", "0" * 64) is not None
        print(found(Knowledge(directory)).origin)
    """
    assert as_nobody(program, public) == "tuned\n"


USES = """if True:
    import pathlib, sys
    import jax, jax.numpy as jnp
    import tracea_jax as tracea
    from tracea_jax import cli
    from tracea_jax.options import current

    x = jnp.ones((64, 64))
    y = jax.jit(lambda x: tracea.ops.matmul(x, x))(x)
    assert y[0, 0] == 64
    print(tracea.explain(tracea.transform(lambda x: x @ x))(x))
    print(tracea.doctor())
    assert cli.main(["cache", "list"]) == 0
    cli.main(["cache", "verify"])
    print("used")
"""


# The whole cache, and one file; the directories between them are slow tests.
@needs_root
@pytest.mark.parametrize(
    "hidden",
    [
        "",
        pytest.param("tuned", marks=pytest.mark.slow),
        pytest.param("tuned/*", marks=pytest.mark.slow),
        pytest.param("tuned/*/matmul", marks=pytest.mark.slow),
        "tuned/*/*/*",
    ],
)
def test_what_only_root_can_read_is_a_miss_with_one_warning(
    public, hidden, monkeypatch
):
    Knowledge(public).own.record(entry(observations=[measured(8)]))
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    (place,) = public.glob(hidden) if hidden else [public]
    place.chmod(0o700)
    text = as_nobody(USES, TRACEA_CACHE_DIR=str(public))
    assert text.count("RuntimeWarning") <= 1 and text.endswith("used\n")
    program = """if True:
        import pathlib, sys
        from synthetic_bench import DEVICE, PROBLEM
        from tracea_jax.tuning.answers.knowledge import Knowledge
        for _ in range(2):
            knowledge = Knowledge(pathlib.Path(sys.argv[1]))
            assert knowledge.lookup(PROBLEM, DEVICE) is None
            assert not knowledge.observations(PROBLEM, DEVICE)
            assert not list(knowledge.own.entries())
            knowledge.digest(DEVICE)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 1 and "cannot be read" in text


@needs_root
def test_what_only_root_can_write_is_used_and_not_written(public):
    Knowledge(public).own.record(entry())
    save_kernel(public)
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    before = sorted(public.rglob("*"))
    program = """if True:
        import pathlib, sys
        from sample_kernels import scale
        from synthetic_bench import DEVICE, PROBLEM, choice, entry, found, measured
        from tracea_jax.runtime import cubins
        from tracea_jax.tuning.answers.knowledge import Knowledge
        directory = pathlib.Path(sys.argv[1])
        for _ in range(2):
            cubins.record_failure(directory, scale(), "timeout", "60 s")
        cubins.mark_winner(directory, scale())
        cubins.collect(directory, 0, min_age_s=-60)
        first = Knowledge(directory).lookup(PROBLEM, DEVICE)
        for kc in (9, 10):
            knowledge = Knowledge(directory)
            journal = knowledge.own.journal(PROBLEM, DEVICE)
            knowledge.own.append(journal, (measured(3),))
            knowledge.own.record(entry(choice(kc), written=f"2027-{kc}"), journal)
            journal.close()
        assert found(Knowledge(directory)).choice == choice(10)
        assert first is not None and first.choice == choice(8)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 2  # of answers, and of kernels
    assert text.count("cannot be written") == 2
    assert sorted(public.rglob("*")) == before


@needs_root
def test_kernels_that_only_root_can_read_are_a_miss_with_one_warning(public):
    save_kernel(public)
    public.joinpath("cubin").chmod(0o700)
    program = """if True:
        import pathlib, sys
        from tracea_jax.runtime import cubins
        directory = pathlib.Path(sys.argv[1])
        for _ in range(2):
            assert cubins.load(directory, "sm_90a", "0" * 64) is None
            assert cubins.failure(directory, "sm_90a", "0" * 64) is None
        assert not cubins.is_trusted(directory)
        cubins.collect(directory, 0, min_age_s=-60)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 1 and "cannot be read" in text
    public.joinpath("cubin").chmod(0o755)
    assert kernels.load(public, "sm_90a", KEY) == cubin()
