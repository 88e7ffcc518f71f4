"""Models in the package: their files, and which one serves a device."""

from __future__ import annotations

import dataclasses
import importlib.metadata

import pytest
from modelled import AMX, of_products

from tracea_jax import policy
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.diagnosis import diagnose
from tracea_jax.doctor import doctor
from tracea_jax.model import features, model, shipped
from tracea_jax.model.model import Model
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import trust

pytestmark = pytest.mark.once


def test_shipped_models_are_small_and_as_written():
    for path in sorted(shipped.DATA.glob("*.npz")):
        data = path.read_bytes()
        assert len(data) <= 500 << 10
        assert Model.from_bytes(data).to_bytes() == data
        assert shipped.of_kind(path.stem) is not None
    assert shipped.of_kind("no such device") is None


def test_a_damaged_file_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    monkeypatch.setattr(trust, "_warned", set())
    shipped.forget()
    (tmp_path / "cpu-amx.npz").write_bytes(of_products().to_bytes()[:-99])
    diagnosis = diagnose(GemmProblem(m=99, n=99, k=99), AMX)
    with pytest.warns(RuntimeWarning, match="cpu-amx.npz cannot be read"):
        found = policy.decide(diagnosis)
    shipped.forget()
    assert found == policy.unmodelled(diagnosis)


def test_doctor_names_the_model_in_use(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "DATA", tmp_path)
    known = of_products().ops["matmul"]
    seen = {"model": {"geomean": 1.234, "under": [0.005, 0.0]}}
    here = {"jax": importlib.metadata.version("jax")}
    found = []
    for run in (here, {"jax": "0.0.1"}):
        facts = {"problems": 77, "held out": seen, "versions": [run]}
        own = dataclasses.replace(known, facts=facts)
        kind = model.device_kind(local_cpu())
        data = Model(device=kind, ops={"matmul": own}).to_bytes()
        (tmp_path / f"{kind}.npz").write_bytes(data)
        shipped.forget()
        report = doctor()
        found.append(report.models)
        text = (
            "1 kinds of problem, 77 problems surveyed; held out, 1.23 times as fast "
            "as the best peer, 0.5% under 0.97"
        )
        assert text in str(report)
    shipped.forget()
    assert [m.same_versions for (m,) in found] == [True, False]
    assert [m.op for (m,) in found] == ["matmul"] * 2


# --- which model serves a device ------------------------------------------------------


@pytest.fixture
def of_gpus(monkeypatch, tmp_path):
    """Writes models of GPUs with these shares of losses, by their names."""
    monkeypatch.setattr(shipped, "DATA", tmp_path)

    def write(**shares: float) -> None:
        for name, share in shares.items():
            known = of_products().ops["matmul"]
            facts = {"model": {"under": [share, 0.0]}}
            kinds = {
                n: dataclasses.replace(kind, facts=facts)
                for n, kind in known.kinds.items()
            }
            numbers = features.of_problem(GemmProblem(m=99, n=99, k=99), NAMED[name])
            reach = {n: (v - 1, v + 1) for n, v in numbers.items()}
            op = dataclasses.replace(known, kinds=kinds, reach=reach)
            kind = model.device_kind(NAMED[name])
            data = Model(device=kind, ops={"matmul": op}).to_bytes()
            (tmp_path / f"{kind}.npz").write_bytes(data)
        shipped.forget()

    yield write
    shipped.forget()


def test_a_gpu_without_a_survey_has_the_model_of_the_nearest_alike(of_gpus):
    asked = GemmProblem(m=99, n=99, k=99)
    of_gpus(A100=0.0, H200=0.01)
    for name, surveyed in (("H200", "H200"), ("H100", "H200"), ("A100", "A100")):
        device = NAMED[name]
        assert shipped.surveyed_for(device) == NAMED[surveyed]
        found = shipped.covering(asked, device)
        assert found is not None and found == shipped.serving(device)
        assert found.device == model.device_kind(device)
    served = (shipped.covering(asked, NAMED[n]) for n in ("H200", "H100"))
    own, other = (m.ops["matmul"] for m in served if m)
    assert other.regressors.keys() == own.regressors.keys()
    for name, regressor in own.regressors.items():
        assert other.regressors[name].noise >= regressor.noise
    larger = dataclasses.replace(asked, m=9999)
    for name in ("H200", "H100"):  # beyond the reach
        assert shipped.covering(larger, NAMED[name]) is None
    alone = dataclasses.replace(NAMED["H100"], capability=(10, 0))
    assert shipped.surveyed_for(alone) is None is shipped.serving(alone)
    assert shipped.surveyed_for(AMX) is None is shipped.covering(asked, AMX)


def test_elsewhere_a_model_leaves_kinds_that_lost_too_much(of_gpus):
    asked = GemmProblem(m=99, n=99, k=99)
    of_gpus(H200=0.02)
    assert shipped.covering(asked, NAMED["H200"]) is not None
    assert shipped.covering(asked, NAMED["H100"]) is None
    of_gpus(H100=0.02)
    assert shipped.covering(asked, NAMED["H100"]) is not None
