"""The cache folder: nothing half-written, one writer at a time, and errors that say what helps."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from eesd_lite import home as home_module
from eesd_lite.errors import PrepareError
from eesd_lite.home import atomic_dir, disk_errors, entries, home, locked, publish, remove, require_free, size_of

Usage = namedtuple("Usage", "total used free")


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def dead_process_id() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_home_is_taken_from_the_environment(cache_home: Path) -> None:
    assert home() == cache_home


def test_home_defaults_to_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EESD_HOME", raising=False)
    assert home() == Path.home() / ".cache" / "eesd-lite"


def test_an_atomic_folder_appears_whole_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_dir(target) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "weights").write_bytes(b"abc")
        assert not target.exists()
    assert (target / "sub" / "weights").read_bytes() == b"abc"
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("failure", [ValueError("bug"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failure_inside_an_atomic_folder_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)), atomic_dir(tmp_path / "model") as partial:
        (partial / "weights").write_bytes(b"half")
        raise failure
    assert os.listdir(tmp_path) == []


def test_an_existing_target_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(PrepareError, match="exists already"), atomic_dir(tmp_path / "model"):
        raise AssertionError("the block must not run")


def test_replacing_keeps_the_old_folder_until_the_new_one_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(ValueError), atomic_dir(target, replace=True):
        raise ValueError
    assert os.listdir(target) == ["old"]
    with atomic_dir(target, replace=True) as partial:
        (partial / "new").touch()
    assert os.listdir(target) == ["new"]
    assert os.listdir(tmp_path) == ["model"]


def test_the_temporary_folder_of_a_dead_process_is_removed_and_a_living_ones_is_kept(tmp_path: Path) -> None:
    mine = home_module._partial_beside(tmp_path / "other")
    dead = tmp_path / mine.name.replace(f"-{os.getpid()}-", f"-{dead_process_id()}-")
    reused = tmp_path / f".other.{home_module._host()}-{os.getpid()}-1-00.partial"
    elsewhere = tmp_path / ".other.00000000-1-1-00.partial"
    for folder in (mine, dead, reused, elsewhere):
        folder.mkdir()
    with atomic_dir(tmp_path / "model"):
        pass
    assert leftovers(tmp_path) == sorted([mine.name, elsewhere.name])


def test_a_full_disk_inside_an_atomic_folder_is_one_clear_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"disk full while writing .*model \(.*free\).*EESD_HOME"):
        with atomic_dir(tmp_path / "model") as partial:
            (partial / "weights").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert os.listdir(tmp_path) == []


def test_a_full_disk_reported_as_text_by_a_rust_writer_is_recognised(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match="disk full"), disk_errors(tmp_path / "x"):
        raise RuntimeError("Error while serializing: IoError(No space left on device (os error 28))")


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EIO, errno.EROFS])
def test_a_write_that_fails_names_the_target_and_what_helps(tmp_path: Path, number: int) -> None:
    with pytest.raises(PrepareError, match="writing .*target failed .*set EESD_HOME"), disk_errors(tmp_path / "target"):
        raise OSError(number, os.strerror(number))


def test_other_errors_pass_through_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output"), disk_errors(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/source")


def test_a_folder_that_cannot_be_created_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PrepareError, match="cannot create .*EESD_HOME"), atomic_dir(tmp_path / "file" / "model"):
        raise AssertionError("the block must not run")


def test_too_little_space_is_said_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1024))
    with pytest.raises(PrepareError, match=r"preparing x needs 2\.00 KiB free in .*, only 1\.00 KiB are"):
        require_free(tmp_path / "not" / "yet", 2048, "preparing x")
    require_free(tmp_path, 1024, "preparing x")


def test_a_lock_makes_the_second_holder_wait_and_say_so(cache_home: Path) -> None:
    order: list[str] = []
    said = threading.Event()

    def second() -> None:
        with locked(cache_home / "models" / "m", lambda stage, done, total: (order.append(stage), said.set())):
            order.append("second")

    with locked(cache_home / "models" / "m"):
        thread = threading.Thread(target=second)
        thread.start()
        assert said.wait(30)
        order.append("first")
    thread.join(30)
    assert order[0] == "waiting for another process that is working on m"
    assert order.index("first") < order.index("second")


def test_locks_of_folders_with_the_same_name_are_different(cache_home: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "m"), locked(tmp_path / "b" / "m"):
        assert len(list((cache_home / "locks").iterdir())) == 2


def test_files_of_a_finished_folder_are_readable_like_the_folder(tmp_path: Path) -> None:
    with atomic_dir(tmp_path / "model") as partial:
        partial.chmod(0o755)
        (partial / "weights").touch(mode=0o600)
    assert (tmp_path / "model" / "weights").stat().st_mode & 0o777 == 0o644


def make_entry(path: Path, size: int) -> None:
    path.mkdir(parents=True)
    (path / "file").write_bytes(b"x" * size)


def test_entries_list_models_first_with_their_sizes_and_hide_locks(cache_home: Path) -> None:
    assert entries() == []
    make_entry(cache_home / "packed" / "p", 5)
    make_entry(cache_home / "models" / "m", 7)
    make_entry(cache_home / "locks" / "l", 1)
    make_entry(cache_home / "work" / ".w.00000000-1-1-00.partial", 3)
    listed = [(entry.kind, entry.name, entry.bytes) for entry in entries()]
    assert listed == [("models", "m", 7), ("packed", "p", 5), ("partial", ".w.00000000-1-1-00.partial", 3)]


def test_removing_frees_every_entry_of_that_name(cache_home: Path) -> None:
    make_entry(cache_home / "models" / "m", 7)
    make_entry(cache_home / "packed" / "m", 5)
    make_entry(cache_home / "models" / "kept", 1)
    assert remove("m") == 12
    assert [entry.name for entry in entries()] == ["kept"]


def test_removing_by_kind_keeps_the_others(cache_home: Path) -> None:
    make_entry(cache_home / "models" / "m", 7)
    make_entry(cache_home / "packed" / "m", 5)
    assert remove("packed/m") == 5
    assert [entry.kind for entry in entries()] == ["models"]


@pytest.mark.parametrize("name", ["nope", "../outside", "", "models"])
def test_removing_what_is_not_there_lists_what_is(cache_home: Path, name: str) -> None:
    make_entry(cache_home / "models" / "m", 7)
    make_entry(cache_home.parent / "outside", 1)
    with pytest.raises(PrepareError, match=r"it holds: m$"):
        remove(name)
    assert (cache_home.parent / "outside").exists()


def test_what_a_running_process_writes_is_not_removed(cache_home: Path) -> None:
    with atomic_dir(cache_home / "models" / "m") as partial:
        with pytest.raises(PrepareError, match="being written by a running process"):
            remove(partial.name)
        assert partial.is_dir()


def test_publishing_renames_on_the_spot(tmp_path: Path) -> None:
    make_entry(tmp_path / "work", 3)
    publish(tmp_path / "work", tmp_path / "model")
    assert size_of(tmp_path / "model") == 3
    assert os.listdir(tmp_path) == ["model"]
