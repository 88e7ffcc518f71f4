"""Files with a valid checksum and wrong content: refused whole, and nothing is lost."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from synthetic_bench import (
    DEVICE,
    PROBLEM,
    choice,
    entry,
    failed,
    file_of,
    found,
    measured,
)

from tracea_jax import cli, schema
from tracea_jax.problem import GemmProblem, problem_from_json
from tracea_jax.runtime import trust
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.store import exchange, files, formats, own, records
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import Environment, canonical
from tracea_jax.tuning.store.records import Best, Entry, Observation

pytestmark = pytest.mark.once


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch):
    monkeypatch.setattr(trust, "_warned", set())


WHOLE = entry(observations=[measured(8), measured(9), failed(7)])
ESCAPE = "\x1b]0;title\x07"
# Where, and what no version has ever written there.
WRONG = [
    (("best", "config"), [1, 2]),
    (("best", "config"), None),
    (("best", "config"), {ESCAPE: 1}),
    (("best", "config", "kc"), float("nan")),
    (("best", "config", "kc"), 1 << 70),
    (("best", "config", "kc"), ESCAPE),
    (("best", "ratio"), [1]),
    (("best", "ratio"), float("inf")),
    (("best", "ratio"), -1.0),
    (("best", "time_us"), "fast"),
    (("best", "time_us"), True),
    (("best", "time_us"), 0),
    (("best", "time_us"), float("nan")),
    (("best", "time_us"), 1 << 4000),
    (("best", "variant"), ESCAPE),
    (("best", "variant"), 1),
    (("best", "variant"), "a\u061cb"),
    (("best", "origin"), "a\nb"),
    (("best", "goal"), None),
    (("best", "runner_up"), []),
    (("best", "runner_up"), {"time_us": "1"}),
    (("best", "runner_up"), {"variant": "xla", "config": [1]}),
    (("best", "later"), float("nan")),
    (("best",), []),
    (("environment",), []),
    (("environment", "device"), ["a"]),
    (("environment", "device"), ESCAPE),
    (("environment", "units"), "4"),
    (("environment", "units"), -1),
    (("environment", "units"), 4.5),
    (("environment", "arch"), "x" * 1000),
    (("environment", "schema"), True),
    (("problem",), "matmul"),
    (("problem", "m"), float("nan")),
    (("problem", "op"), "\x9b2J"),
    (("verified",), [True]),
    (("tuner",), 1),
    (("tuner", "merged"), {"a": 1}),
    (("tuner", "merged"), [1]),
    (("tuner", "stop"), "‮hidden"),
    (("written",), 2026),
    (("written",), "2026\r"),
    (("observations",), {}),
    (("observations",), [1]),
    (("observations", 0), []),
    (("observations", 0, "config"), [1]),
    (("observations", 0, "time_us"), "1.0"),
    (("observations", 0, "time_us"), -1),
    (("observations", 0, "repeats"), 1.5),
    (("observations", 0, "repeats"), -1),
    (("observations", 0, "message"), 5),
    (("observations", 0, "failure"), "\x1b[2J"),
    (("observations", 0, "extra"), []),
    (("observations", 0, "extra"), {"drift": "1"}),
    (("observations", 0, "extra"), {"abandoned": 1}),
    (("observations", 0, "extra"), {"deep": math.inf}),
    (("later",), float("-inf")),
]


def changed(path, value) -> dict:
    data = json.loads(canonical(WHOLE.to_json()))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


def archive(*entries: dict) -> bytes:
    lines = ",\n".join(json.dumps(data) for data in entries)
    return formats.signed(f'"entries": [\n{lines}\n]}}\n')


def content(data: dict) -> bytes:
    """The file of an entry."""
    observations = data.pop("observations")
    body = f'"head": {json.dumps(data)},\n"observations": {json.dumps(observations)}}}'
    return formats.signed(f"{body}\n")


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_an_archive_is_merged_whole_or_not_at_all(tmp_path, path, value):
    good = dataclasses.replace(WHOLE, problem=PROBLEM_2.to_json()).to_json()
    file = tmp_path / "archive"
    file.write_bytes(archive(good, changed(path, value)))
    with pytest.raises(formats.Damaged, match="export it again") as caught:
        exchange.read(file)
    assert schema.text(str(caught.value)) is None
    assert not (tmp_path / "cache").exists()


PROBLEM_2 = dataclasses.replace(PROBLEM, k=PROBLEM.k * 2)


@pytest.mark.parametrize(("path", "value"), WRONG)
def test_an_entry_is_set_aside_and_not_lost(tmp_path, path, value):
    file = file_of(tmp_path)
    trust.make_private_directory(file.parent)
    data = content(changed(path, value))
    trust.write_atomically(file, data)
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        Knowledge(tmp_path).observations(PROBLEM, DEVICE)
        assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
    assert schema.text(str(caught[0].message)) is None
    (aside,) = file.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == data
    Knowledge(tmp_path).own.record(entry())
    assert found(Knowledge(tmp_path)).choice == choice(8)


def test_an_archive_with_nothing_wrong_is_merged(tmp_path):
    file = tmp_path / "archive"
    file.write_bytes(archive(changed(("best", "ratio"), 2)))
    exchange.merge(Store.of_cache(tmp_path / "cache"), exchange.read(file))
    assert found(Knowledge(tmp_path / "cache")).ratio == 2


@pytest.mark.parametrize(
    "field",
    [{"kc": True}, {"kc": 8.0}, {"nc": None}, {"tasks": "2"}, {"tasks": [2]}],
)
def test_a_config_of_another_type_is_not_legal(field):
    config = {**dataclasses.asdict(choice(8).config), **field}
    assert isinstance(legal_choice("gemm_cpu", config, PROBLEM, DEVICE), str)
    good = dataclasses.asdict(choice(8).config)
    assert legal_choice("gemm_cpu", good, PROBLEM, DEVICE) == choice(8)


@pytest.mark.parametrize(
    "field",
    [
        {"m": True},
        {"m": 96.0},
        {"lhs": 4},
        {"lhs_batched": 1},
        {"layout": "xy"},
        {"layout": ["n"]},
        {"epilogue": {"residual": 1}},
        {"epilogue": [1]},
        {"op": ["matmul"]},
        {"more": 1},
    ],
)
def test_a_problem_of_other_types_is_no_problem(field):
    with pytest.raises(ValueError):
        problem_from_json({**PROBLEM.to_json(), **field})
    assert problem_from_json(PROBLEM.to_json()) == PROBLEM


# What a newer version wrote.

LATER = {"of": ["another", {"version": 1.5}]}


def newer() -> dict:
    """An entry with a field that is not known here in every place."""
    data = WHOLE.to_json()
    data["later"] = data["best"]["later"] = data["environment"]["later"] = LATER
    for observation in data["observations"]:
        observation["later"] = LATER
    data["observations"][0] |= {"failure": "cosmic_ray", "repeats": 0}
    data["observations"][0].pop("time_us", None)
    return data


def unknown_in(data: dict) -> list:
    places = (data, data["best"], data["environment"], *data["observations"])
    return [place.get("later") for place in places]


def test_fields_and_failures_of_a_newer_version_survive_a_rewrite(tmp_path):
    place = Environment.from_json(newer()["environment"])
    described = dataclasses.asdict(WHOLE.environment)
    del described["unknown"]
    assert place.key == environment_key({**described, "later": LATER})
    assert place.key != WHOLE.environment.key
    store = Store.of_cache(tmp_path)
    exchange.merge(store, [Entry.from_json(newer())])
    slower = dataclasses.replace(entry().best, time_us=1e9)
    known = dataclasses.replace(entry(), environment=place, best=slower)
    exchange.merge(store, [known])
    exchange.export(store, tmp_path / "archive")
    (again,) = exchange.read(tmp_path / "archive")
    data = again.to_json()
    assert unknown_in(data) == [LATER] * 6
    kinds = [o.get("failure") for o in data["observations"]]
    assert "cosmic_ray" in kinds
    # It may be as bad as a wrong result: no later measurement outweighs it.
    (lost,) = [o for o in again.observations if o.failure == records.UNKNOWN]
    better = dataclasses.replace(measured(8), config=lost.config, repeats=1 << 20)
    assert records.union([better], [lost]) == (lost,)


def environment_key(data: dict) -> str:
    from tracea_jax.tuning.store.environment import digest

    return digest(canonical(data), 12)


def test_what_a_tuning_records_keeps_the_fields_of_a_newer_version(tmp_path):
    data = newer()
    del data["environment"]["later"]
    file = file_of(tmp_path)
    trust.make_private_directory(file.parent)
    trust.write_atomically(file, content(data))
    Knowledge(tmp_path).own.record(entry(choice(9), observations=[measured(20)]))
    (name,) = Store.of_cache(tmp_path).names()
    read = Store.of_cache(tmp_path).intact(name).to_json()
    assert read["later"] == LATER
    later = [o.get("later") for o in read["observations"]]
    assert later.count(LATER) == len(later) - 1 == 3


def test_only_what_a_file_says_may_have_an_unknown_failure():
    line = '{"variant": "xla", "config": {}, "failure": "cosmic_ray"}'
    read = records.parse_observation(line)
    assert read is not None and read.failure == records.UNKNOWN
    assert json.loads(records.observation_line(read)) == json.loads(line)
    with pytest.raises(ValueError, match="unknown"):
        Observation(variant="xla", config={}, failure=records.UNKNOWN)


# Journals.


def test_bad_lines_of_a_journal_are_skipped_counted_and_kept(tmp_path):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(3),))
    assert journal.path is not None
    line = records.observation_json(measured(4))
    bad = [
        json.dumps({**line, "time_us": math.nan}),
        json.dumps({**line, "extra": {"x": math.inf}}),
        json.dumps({**line, "config": [1, 2]}),
        "[" * 200_000,
        '{"config": ' * 200_000,
        "\0\0\0",
        json.dumps({**line, "variant": ESCAPE}),
    ]
    with journal.path.open("a") as f:
        f.write("".join(text + "\n" for text in bad))
    knowledge.own.append(journal, (measured(5),))
    journal.close()
    assert knowledge.observations(PROBLEM, DEVICE) == (measured(3), measured(5))
    with pytest.warns(RuntimeWarning, match=f"{len(bad)} lines of .* cannot be read"):
        knowledge.own.record(entry())
    assert knowledge.observations(PROBLEM, DEVICE) == (measured(3), measured(5))
    (aside,) = tmp_path.glob("tuned/*/*/*.journal.corrupt-*")
    assert all(text in aside.read_text() for text in bad)
    assert not list(tmp_path.glob("tuned/*/*/*.journal"))


# Text.


def test_messages_do_nothing_to_a_terminal(tmp_path, monkeypatch, capsys):
    told = dataclasses.replace(failed(7), message=f"{ESCAPE}\x9b2J\u202e\tü\nok")
    assert told.message == "\\x1b]0;title\\x07\\x9b2J\\u202e\tü\nok"
    raw = records.observation_json(told) | {"message": ESCAPE}
    read = records.parse_observation(json.dumps(raw))
    assert read is not None and read.message == "\\x1b]0;title\\x07"
    Knowledge(tmp_path).own.record(entry(observations=[told]))
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(tmp_path))
    assert cli.main(["cache", "show", "matmul"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_nested_too_deep_is_refused():
    data: object = 1
    for _ in range(20):
        data = [data]
    assert "nested" in str(schema.plain(data))
    with pytest.raises(ValueError):
        Best.from_json({"variant": "xla", "config": {}, "later": data})
    for text in (b"[" * 200_000, b'{"a":' * 200_000):
        with pytest.raises(formats.Damaged):
            Entry.from_bytes(formats.signed(f'"head": {text.decode()}'))
        with pytest.raises(formats.Damaged):
            Entry.from_bytes(text)


# Annotations as a table.


@dataclasses.dataclass
class Typed:
    n: int = 1
    x: float = 0.5
    pair: tuple[int, int] = (1, 2)
    many: tuple[str, ...] = ()
    maybe: int | None = None
    problem: GemmProblem = PROBLEM


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("n", 2, True),
        ("n", True, False),
        ("n", 2.0, False),
        ("x", 2, True),
        ("x", "2", False),
        ("pair", (1, 2, 3), False),
        ("pair", (1, "2"), False),
        ("pair", [1, 2], False),
        ("many", ("a", "b"), True),
        ("many", ("a", 1), False),
        ("maybe", 3, True),
        ("maybe", "3", False),
        ("problem", 1, False),
        ("problem", dataclasses.replace(PROBLEM, m="1"), False),
    ],
)
def test_annotations_are_checked(name, value, fits):
    record = Typed(**{name: value})
    if fits:
        schema.check_types(record)
    else:
        with pytest.raises(schema.Mistyped, match="must be"):
            schema.check_types(record)


# What two entries make together.


def merged_twice(directory, *others: Entry) -> exchange.Merged:
    """Archives that are right, one after the other, into a cache with an answer."""
    Knowledge(directory).own.record(WHOLE)
    for other in others:
        file = directory / "archive"
        file.write_bytes(exchange.pack([other]))
        merged = exchange.merge(Store.of_cache(directory), exchange.read(file))
    return merged


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


@pytest.mark.parametrize("what", ["long", "deep", "large"])
def test_a_union_that_could_not_be_read_is_not_written(tmp_path, what, monkeypatch):
    other = entry(choice(9), observations=[measured(9)], written="2000")
    if what == "deep":
        others = [dataclasses.replace(other, tuner={"later": nested(15)})]
    elif what == "long":
        tunings = [{"seed": seed} for seed in range(10_000)]
        others = [dataclasses.replace(other, tuner={"merged": tunings})]
    else:
        long = dataclasses.replace(measured(20), message="x" * 9000)
        monkeypatch.setattr(files, "LIMIT_BYTES", 9000)
        others = [dataclasses.replace(other, observations=(long,))]
    told = merged_twice(tmp_path, *others)
    assert told.changed == 0 and "could read it again" in told.refused[0]
    assert found(Knowledge(tmp_path)).choice == choice(8)
    assert not list(tmp_path.rglob("*.corrupt-*"))


def test_a_tuning_whose_entry_could_not_be_read_is_kept_in_memory(tmp_path):
    Knowledge(tmp_path).own.record(WHOLE)
    mistaken = dataclasses.replace(
        entry(choice(9), written="2027"), verified={"error": ESCAPE}
    )
    with pytest.warns(RuntimeWarning, match="cannot be written.*read it again"):
        Knowledge(tmp_path).own.record(mistaken)
    own._unwritten.clear()
    assert found(Knowledge(tmp_path)).choice == choice(8)


@pytest.mark.parametrize("last", ["~" * 256, "\U0010ffff" * 256])
def test_nothing_claims_to_be_the_last_ever_recorded(tmp_path, last):
    Knowledge(tmp_path).own.record(dataclasses.replace(WHOLE, written=last))
    for kc in (9, 10):
        new = entry(choice(kc), written=f"2026-01-{kc:02}", observations=[measured(kc)])
        Knowledge(tmp_path).own.record(new)
        assert found(Knowledge(tmp_path)).choice == choice(kc)
    (stored,) = Knowledge(tmp_path).own.entries(complete=True)
    assert len(stored.observations) == len(WHOLE.observations) + 1
    assert not list(tmp_path.rglob("*.corrupt-*"))
