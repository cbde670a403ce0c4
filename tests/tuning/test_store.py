"""The user's cache of tuned cases: what is written is read again, and nothing that is wrong with it does harm."""

import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from iris import _target
from iris.runtime.groups import Group
from iris.runtime.logs import logger
from iris.tuning import store
from iris.tuning.query import Entry, Query

QUERY = Query(
    "all_gather_matmul", "h200", "sm_90", "nvlink", 2, 132, "float16", (("M", 8192), ("N", 4096), ("K", 14336)),
    (("gather_dim", "1"), ("transpose", "NN")), (("output", "float16"),),
)  # fmt: skip
RECORD = store.Record(
    "tuned 8192x4096x14336", "hbm_buffer", {"block_size_m": 128, "num_fetch_sms": 20}, QUERY.sizes, 1.25, 1.5, 1.2,
    "two GPUs", True, "0123456789abcdef", 1.3, (("default", 1.3), ("torch", 1.5), ("tile 256", None)),
    "2026-01-02T03:04:05Z", "here",
)  # fmt: skip


def query(**other):
    return Query(**{**{name: getattr(QUERY, name) for name in QUERY.__dataclass_fields__}, **other})


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_warned", set())
    return tmp_path / "cache" / "tuned"


@pytest.fixture
def warnings():
    found = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


def test_what_is_written_is_read_again_with_every_field(place):
    assert store.write("all_gather_matmul", {QUERY: RECORD}) == place / "all_gather_matmul.json"
    assert store.read_all() == {QUERY: RECORD}
    (found,) = store.read_all().values()
    assert dict(found.params) == {"block_size_m": 128, "num_fetch_sms": 20}
    assert found.key == RECORD.key
    with pytest.raises(TypeError):
        found.params["block_size_m"] = 64
    assert [path.name for path in place.iterdir() if not path.name.endswith(".lock")] == ["all_gather_matmul.json"]


def test_numbers_that_are_not_known_stay_unknown():
    bare = store.Record("n", "torch", {}, QUERY.sizes, None, None, None, "s")
    store.write("all_gather_matmul", {QUERY: bare})
    assert store.read_all() == {QUERY: bare}


def test_a_file_holds_json_with_its_schema_and_the_query(place):
    store.write("all_gather_matmul", {QUERY: RECORD})
    content = json.loads((place / "all_gather_matmul.json").read_text())
    assert content["schema"] == store.SCHEMA
    ((key, value),) = content["records"].items()
    assert value["query"]["sizes"] == {"M": 8192, "N": 4096, "K": 14336}
    assert value["candidates"] == {"default": 1.3, "torch": 1.5, "tile 256": None}
    assert key == store.key_of(QUERY)


@pytest.mark.parametrize(
    "other",
    [
        {"operation": "matmul_all_gather"}, {"machine": "h100"}, {"arch": "sm_100"}, {"link": "pcie"}, {"world": 4},
        {"units": 66}, {"dtype": "bfloat16"}, {"sizes": (("M", 8192), ("N", 4096), ("K", 14337))},
        {"options": (("gather_dim", "0"), ("transpose", "NN"))}, {"details": (("output", "float32"),)}, {"details": ()},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_a_record_is_for_one_query_alone(other):
    store.write(QUERY.operation, {QUERY: RECORD})
    changed = query(**other)
    assert store.key_of(changed) != store.key_of(QUERY)
    assert changed not in store.read_all()
    store.write(changed.operation, {changed: RECORD})
    assert len(store.read_all()) == 2


def test_a_later_record_takes_the_place_of_an_earlier_one_and_others_stay():
    other = query(world=4)
    store.write("all_gather_matmul", {QUERY: RECORD, other: RECORD})
    better = store.Record("n", "pull", {}, QUERY.sizes, 1.0, 1.5, 1.5, "s")
    store.write("all_gather_matmul", {QUERY: better})
    assert store.read_all() == {QUERY: better, other: RECORD}


def test_records_of_other_versions_are_kept_and_not_used(monkeypatch):
    store.write("all_gather_matmul", {QUERY: RECORD})
    monkeypatch.setattr(store, "versions", lambda: (("iris", "9"), ("triton", "3.9.0"), ("torch", "2.13.0")))
    assert store.read_all() == {}
    assert [saved.query for saved in store.saved_records()] == [QUERY]
    store.write("all_gather_matmul", {QUERY: RECORD})
    assert store.read_all() == {QUERY: RECORD}
    assert len(store.saved_records()) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"null", b'{"records": {}}', b'{"schema": "1", "records": {}}',
     b'{"schema": 0, "records": {}}', b'{"schema": 1, "records": []}'],
)  # fmt: skip
def test_a_corrupt_file_is_set_aside_with_a_warning_that_names_it(place, warnings, content):
    place.mkdir(parents=True)
    path = place / "all_gather_matmul.json"
    path.write_bytes(content)
    (place / "all_gather_matmul.json.corrupt-1").write_text("an earlier one")
    assert store.read_all() == {}
    assert (place / "all_gather_matmul.json.corrupt-2").read_bytes() == content
    assert not path.exists()
    (text,) = warnings
    assert str(path) in text
    assert "corrupt-2" in text
    store.write("all_gather_matmul", {QUERY: RECORD})
    assert store.read_all() == {QUERY: RECORD}


def test_a_writer_sets_a_corrupt_file_aside_too(place, warnings):
    place.mkdir(parents=True)
    (place / "all_gather_matmul.json").write_text("{")
    store.write("all_gather_matmul", {QUERY: RECORD})
    assert store.read_all() == {QUERY: RECORD}
    assert (place / "all_gather_matmul.json.corrupt-1").read_text() == "{"
    assert len(warnings) == 1


def test_one_bad_record_costs_itself_alone(place, warnings):
    store.write("all_gather_matmul", {QUERY: RECORD})
    path = place / "all_gather_matmul.json"
    content = json.loads(path.read_text())
    (good,) = content["records"].values()
    bad = {
        "no query": {k: v for k, v in good.items() if k != "query"},
        "no record": 3,
        "world": {**good, "query": {**good["query"], "world": "two"}},
        "params": {**good, "params": [1]},
        "milliseconds": {**good, "milliseconds": "fast"},
        "surplus": {**good, "colour": "red"},
    }
    path.write_text(json.dumps({**content, "records": {**content["records"], **bad}}))
    assert store.read_all() == {QUERY: RECORD}
    assert len(warnings) == len(bad)
    for name in bad:
        assert any(repr(name) in text for text in warnings)
    store.read_all()
    assert len(warnings) == len(bad)  # said once


def test_a_file_of_a_newer_schema_is_left_alone_with_a_warning(place, warnings):
    place.mkdir(parents=True)
    path = place / "all_gather_matmul.json"
    path.write_text('{"schema": 2, "records": "of a form not known here"}')
    assert store.read_all() == {}
    assert store.write("all_gather_matmul", {QUERY: RECORD}) is None
    assert store.clear() == 0
    assert path.read_text() == '{"schema": 2, "records": "of a form not known here"}'
    (text,) = warnings
    assert str(path) in text
    assert "newer" in text


def test_a_folder_that_cannot_be_made_is_done_without_and_said_once(tmp_path, monkeypatch, warnings):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("IRIS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert store.read_all() == {}
    assert store.write("all_gather_matmul", {QUERY: RECORD}) is None
    assert store.write("matmul_all_gather", {QUERY: RECORD}) is None
    assert len(warnings) == 1
    assert "not saved" in warnings[0]
    assert "is a file" in store.unwritable()


def test_a_folder_that_is_read_only_is_read(place, monkeypatch, warnings):
    store.write("all_gather_matmul", {QUERY: RECORD})
    (place / "broken.json").write_text("{")

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    # Permissions do not keep root out, so that is imitated where the lock is taken.
    monkeypatch.setattr(store, "_locked", refuse)
    assert store.read_all() == {QUERY: RECORD}
    assert store.write("all_gather_matmul", {query(world=4): RECORD}) is None
    assert store.read_all() == {QUERY: RECORD}
    assert (place / "broken.json").read_text() == "{"
    assert [("broken.json" in text, "not saved" in text) for text in warnings] == [(True, False), (False, True)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_to_write(place, warnings):
    place.mkdir(parents=True)
    place.chmod(0o500)
    assert store.write("all_gather_matmul", {QUERY: RECORD}) is None
    assert len(warnings) == 1


def test_whether_the_folder_can_be_written_is_told_without_making_it(place):
    assert store.unwritable() == ""
    assert not place.parent.exists()
    store.write("all_gather_matmul", {QUERY: RECORD})
    before = sorted(place.iterdir())
    assert store.unwritable() == ""
    assert sorted(place.iterdir()) == before


def test_nothing_is_left_of_a_write_that_fails(place, monkeypatch, warnings):
    store.write("all_gather_matmul", {QUERY: RECORD})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    assert store.write("all_gather_matmul", {query(world=4): RECORD}) is None
    assert "No space left" in warnings[0]
    assert store.read_all() == {QUERY: RECORD}
    assert sorted(path.name for path in place.iterdir() if "lock" not in path.name) == ["all_gather_matmul.json"]


def _hold(path, held, seconds):
    with FileLock(path):
        held.set()
        time.sleep(seconds)


def test_a_lock_that_another_process_keeps_costs_the_record_and_not_the_program(place, monkeypatch, warnings):
    store.write("all_gather_matmul", {QUERY: RECORD})
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    processes = multiprocessing.get_context("fork")
    held = processes.Event()
    holder = processes.Process(target=_hold, args=(f"{place}/all_gather_matmul.json.lock", held, 60))
    holder.start()
    try:
        assert held.wait(30)
        assert store.write("all_gather_matmul", {query(world=4): RECORD}) is None
        assert store.read_all() == {QUERY: RECORD}
    finally:
        holder.terminate()
        holder.join()
    assert "all_gather_matmul.json.lock has been held" in warnings[0]
    # A process that has ended holds no lock.
    assert store.write("all_gather_matmul", {query(world=4): RECORD}) is not None


def _write_some(first, count):
    for i in range(first, first + count):
        store.write("all_gather_matmul", {query(units=i + 1): RECORD})


def test_writers_at_the_same_time_lose_nothing():
    processes = multiprocessing.get_context("fork")
    writers = [processes.Process(target=_write_some, args=(8 * i, 8)) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert {found.units for found in store.read_all()} == set(range(1, 25))


def test_where_the_folder_is(monkeypatch, tmp_path):
    assert store.folder() == tmp_path / "cache"
    monkeypatch.setenv("IRIS_CACHE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store.folder() == tmp_path / "mine"
    monkeypatch.delenv("IRIS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert store.folder() == tmp_path / "xdg" / "iris"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert store.folder() == tmp_path / ".cache" / "iris"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert store.folder() == tmp_path / "Library" / "Caches" / "iris"


def test_a_user_without_a_home(monkeypatch, warnings):
    monkeypatch.delenv("IRIS_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert store.folder() is None
    assert store.read_all() == {}
    assert store.write("all_gather_matmul", {QUERY: RECORD}) is None
    assert store.clear() == 0
    assert "no home" in store.unwritable()
    assert len(warnings) == 1


def test_clearing_removes_one_operation_or_all(place):
    store.write("all_gather_matmul", {QUERY: RECORD, query(world=4): RECORD})
    store.write("all_reduce", {query(operation="all_reduce"): RECORD})
    assert store.clear("all_gather_matmul") == 2
    assert [found.operation for found in store.read_all()] == ["all_reduce"]
    assert store.clear() == 1
    assert store.clear() == 0
    assert store.read_all() == {}


def context(target, shared=None):
    return SimpleNamespace(target=target, shared={} if shared is None else {"tuned": shared})


H200 = _target.KNOWN["h200"]
WORLD = Group((0, 1), 0)


def test_a_context_knows_the_records_of_its_architecture():
    amd = query(machine="mi300x", arch="gfx942")
    store.write("all_gather_matmul", {QUERY: RECORD, amd: RECORD})
    tuned = store.Tuned(context(H200, store.shared_at_start(context(H200))))
    assert tuned.find(QUERY, WORLD) == RECORD
    assert tuned.find(QUERY, Group((5, 3), 1)) == RECORD
    assert tuned.find(amd, WORLD) is None


def test_files_are_read_under_the_interpreter_only_when_the_folder_is_named(monkeypatch, tmp_path):
    here = query(arch="interpreter", machine="")
    store.write("all_gather_matmul", {here: RECORD})
    assert len(json.loads(store.shared_at_start(context(_target.INTERPRETER)))) == 1
    monkeypatch.delenv("IRIS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cache").rename(tmp_path / "iris")
    assert here in store.read_all()
    assert store.shared_at_start(context(_target.INTERPRETER)) == "[]"


def test_what_a_group_learns_is_known_to_that_group_and_saved_by_its_first_rank(place):
    entry = Entry("n", "pull", {"block_size_m": 64}, QUERY.sizes, 1.0, 1.5, 1.5, "s")
    second = store.Tuned(context(H200))
    assert second.learn(QUERY, Group((0, 1), 1), entry, "key") is None
    assert not place.exists()
    first = store.Tuned(context(H200))
    assert first.learn(QUERY, WORLD, entry, "key") == place / "all_gather_matmul.json"
    for tuned in (first, second):
        found = tuned.find(QUERY, WORLD)
        assert (found.algorithm, dict(found.params), found.default_key) == ("pull", {"block_size_m": 64}, "key")
        assert tuned.find(QUERY, Group((1, 0), 1)) is None
        assert tuned.find(QUERY, Group((2, 3), 0)) is None
    (saved,) = store.read_all().values()
    assert (saved.default_key, saved.milliseconds) == ("key", 1.0)
    assert saved.date.endswith("Z")
    assert saved.host


def test_what_was_learnt_goes_before_what_was_read(monkeypatch):
    store.write("all_gather_matmul", {QUERY: RECORD})
    tuned = store.Tuned(context(H200, store.shared_at_start(context(H200))))
    tuned.learn(QUERY, WORLD, Entry("n", "torch", {}, QUERY.sizes, 1.0, 1.0, 1.0, "s"), "key")
    assert tuned.find(QUERY, WORLD).algorithm == "torch"
    assert tuned.find(QUERY, Group((2, 3), 0)) == RECORD


def test_a_name_with_odd_characters_stays_in_the_folder(place, warnings):
    assert store.write("all_reduce", {query(operation="all_reduce", machine="AMD Instinct/é"): RECORD})
    assert [found.machine for found in store.read_all()] == ["AMD Instinct/é"]


def body_contexts(ctx, place):
    """Rank 0 alone has a file; rank 1 has a broken one of its own."""
    import iris

    rank = ctx.get_rank()
    os.environ["IRIS_CACHE_DIR"] = str(Path(place) / str(rank))
    try:
        here = query(arch=ctx.target.arch)
        if rank == 0:
            store.write("all_gather_matmul", {here: RECORD})
        else:
            path = store.file_of("all_gather_matmul")
            path.parent.mkdir(parents=True)
            path.write_text("{")
        another = iris.iris(1 << 20)
        found = another.service("tuned").find(here, another.resolve_group(None))
        return found.key, ctx.service("tuned").find(here, ctx.resolve_group(None))
    finally:
        del os.environ["IRIS_CACHE_DIR"]


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_know_what_rank_0_read(ranks, world, tmp_path):
    for key, before in ranks(world).run(body_contexts, str(tmp_path)):
        assert key == RECORD.key
        assert before is None  # what a context knows does not change when files do
