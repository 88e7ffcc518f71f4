"""The versions of JAX that the package was tested with."""

import pathlib
import re
import tomllib

from processes import run_forked

from tracea_jax import _compat

PROJECT = pathlib.Path(__file__).parents[1] / "pyproject.toml"
IMPORT = """
import sys, warnings
import jax
jax.__version__ = sys.argv[1]
jax.__version_info__ = tuple(map(int, jax.__version__.split(".")))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import tracea_jax
    from tracea_jax import transform, ops
    import tracea_jax.cli
for warning in caught:
    print(warning.category.__name__, warning.filename, warning.message)
"""


def test_pip_installs_no_jax_that_was_not_tested():
    (jax,) = (
        wanted
        for wanted in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
        if wanted.startswith("jax")
    )
    (limit,) = re.findall(r"<(\d+)\.(\d+)$", jax)
    assert tuple(map(int, limit)) == _compat.UNTESTED_JAX


def test_a_newer_jax_is_warned_of_once_at_the_users_import():
    (line,) = run_forked(IMPORT, "0.13.0").splitlines()
    assert line.startswith("RuntimeWarning <string> jax 0.13.0 is newer than")
    assert "'jax<0.13'" in line
    (line,) = run_forked(IMPORT, "1.0.0").splitlines()
    assert "jax 1.0.0 is newer" in line


def test_the_last_tested_minor_is_imported_without_a_word():
    assert run_forked(IMPORT, "0.12.99") == ""
