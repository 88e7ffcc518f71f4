"""The README's example runs as it stands."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp

import tracea_jax as tracea
from tracea_jax import knowledge

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_runs(monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    tuned = []
    monkeypatch.setattr(tracea, "tune", lambda what, *_, **__: tuned.append(what))
    monkeypatch.setattr(
        knowledge, "tune", lambda problem, *_, **__: tuned.append(problem)
    )
    keys = jax.random.split(jax.random.key(0), 12)
    shapes = {"x": (8, 16), "w": (16, 32), "b": (32,), "r": (8, 32)}
    shapes |= {"w_gate": (16, 32), "w_up": (16, 32)}
    shapes |= {"image": (1, 9, 9, 3), "kernel": (3, 3, 3, 4), "c": (4,)}
    shapes |= {"q": (1, 5, 2, 8), "k": (1, 5, 2, 8), "v": (1, 5, 2, 8)}
    names = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    names["labels"] = jnp.arange(8)
    exec(compile(example, "README.md", "exec"), names)
    assert tuned[0] is names["model"] and len(tuned) > 2
    assert [(node.problem.m, node.count) for node in tuned[1]] == [(4096, 32)]
    gradient = jax.grad(lambda w: jax.nn.silu(names["x"] @ w).sum())(names["w"])
    assert jnp.allclose(names["y"], gradient, atol=1e-5)
    assert "caches" in capsys.readouterr().out
