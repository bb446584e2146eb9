"""Local files stay where they are; remote ones are copied whole, once, and again when they have changed."""

import errno
import multiprocessing
import os
import pickle
import signal
import time

import fsspec
import pytest

from streamrl.config.data import DataConfig
from streamrl.config.load import load, resolve
from streamrl.data.fetch import copy_to_local
from streamrl.data.files import read_rows
from streamrl.errors import DataError, MissingFile
from tests.data.worlds import FolderRemote, row, write_jsonl


@pytest.fixture
def remote(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()
    use_remote(str(folder))
    FolderRemote.fetched = 0
    return folder


def use_remote(folder):
    FolderRemote.root = folder
    fsspec.register_implementation("folder", FolderRemote, clobber=True)


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def test_a_local_file_is_used_in_place(tmp_path, cache):
    path = write_jsonl(tmp_path / "a b.jsonl", [row()])
    assert copy_to_local(path, cache) == copy_to_local(f"file://{path}", cache) == path
    assert not os.path.exists(cache)


def test_a_remote_file_is_copied_once_and_reused(remote, cache):
    write_jsonl(remote / "a.jsonl", [row(0), row(1)])
    data = DataConfig(cache_dir=cache)
    assert read_rows("folder://a.jsonl", data) == read_rows(["folder://a.jsonl"], data) == [row(0), row(1)]
    assert FolderRemote.fetched == 1 and len(os.listdir(cache)) == 1


def test_a_changed_source_is_copied_again_and_the_old_copy_stays(remote, cache):
    (remote / "a.jsonl").write_text("one")
    first = copy_to_local("folder://a.jsonl", cache)
    (remote / "a.jsonl").write_text("three")
    second = copy_to_local("folder://a.jsonl", cache)
    assert (open(first).read(), open(second).read()) == ("one", "three")


def test_files_of_one_name_and_other_places_do_not_mix(remote, cache):
    for name in ("x", "y"):
        (remote / name).mkdir()
        (remote / name / "a.jsonl").write_text(name)
        os.utime(remote / name / "a.jsonl", (1, 1))
    assert [open(copy_to_local(f"folder://{name}/a.jsonl", cache)).read() for name in ("x", "y")] == ["x", "y"]


def test_memory_files_work_and_a_query_is_no_part_of_the_extension(cache):
    with fsspec.open("memory://data/m.jsonl", "wb") as file:
        file.write(b'{"prompt": [{"role": "user", "content": "x"}]}')
    assert len(read_rows("memory://data/m.jsonl", DataConfig(cache_dir=cache))) == 1
    with pytest.raises(DataError, match=r"extension '\.csv'"):
        read_rows("https://host.invalid/a.csv?download=x.parquet", DataConfig(cache_dir=cache))


@pytest.mark.parametrize("src", ["folder://none.jsonl", "memory://none.jsonl", "/nowhere/none.jsonl", "none.jsonl", "file:///nowhere/none.jsonl"])
def test_a_missing_source_is_a_file_not_found_error_with_the_path_as_given(remote, cache, src):
    with pytest.raises(FileNotFoundError) as error:
        copy_to_local(src, cache)
    assert isinstance(error.value, MissingFile | DataError) and src in str(error.value)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_unknown_protocol_and_a_folder_say_so(remote, cache):
    (remote / "folder").mkdir()
    with pytest.raises(DataError, match="nosuch"):
        copy_to_local("nosuch://a.jsonl", cache)
    with pytest.raises(DataError, match="list the files"):
        copy_to_local("folder://folder", cache)


class CutShort(FolderRemote):
    """Loses the last byte on the way."""

    def get_file(self, rpath, lpath, **kwargs):
        with open(lpath, "wb") as file:
            file.write(self.cat_file(rpath)[:-1])


def test_a_copy_that_was_cut_short_is_refused_and_leaves_nothing(remote, cache):
    (remote / "a.jsonl").write_text("abc")
    fsspec.register_implementation("folder", CutShort, clobber=True)
    with pytest.raises(DataError, match=r"\(3 bytes\), got 2"):
        copy_to_local("folder://a.jsonl", cache)
    assert os.listdir(cache) == []


def ask(folder, cache, barrier, answers):
    use_remote(folder)
    barrier.wait(60)
    path = copy_to_local("folder://big.jsonl", cache)
    with open(path, "rb") as file:
        answers.put((path, len(file.read())))


def test_processes_that_ask_at_once_all_get_the_whole_file(remote, cache):
    size = 8_000_000
    (remote / "big.jsonl").write_bytes(b"x" * size)
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(4), context.Queue()
    processes = [context.Process(target=ask, args=(str(remote), cache, barrier, answers)) for _ in range(4)]
    for process in processes:
        process.start()
    got = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert len(set(got)) == 1 and got[0][1] == size
    assert [os.path.join(cache, name) for name in os.listdir(cache)] == [got[0][0]]


def test_urls_survive_resolving_and_local_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = "[s3://bucket/a.parquet, 'simplecache::https://host/b.json', b.jsonl, file:///c.jsonl]"
    data = resolve(load([], ["model.path=m", f"data.train_files={files}", "data.cache_dir=here"])).data
    assert data.train_files == ["s3://bucket/a.parquet", "simplecache::https://host/b.json", str(tmp_path / "b.jsonl"), "/c.jsonl"]
    assert data.cache_dir == str(tmp_path / "here")


def write_and_wait(folder, cache, started):
    class Endless(FolderRemote):
        def get_file(self, rpath, lpath, **kwargs):
            with open(lpath, "wb") as file:
                file.write(b"half")
            started.set()
            time.sleep(600)

    FolderRemote.root = folder
    fsspec.register_implementation("folder", Endless, clobber=True)
    copy_to_local("folder://a.jsonl", cache)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(remote, cache):
    (remote / "a.jsonl").write_text("whole")
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    writer = context.Process(target=write_and_wait, args=(str(remote), cache, started))
    writer.start()
    assert started.wait(60)
    (part,) = os.listdir(cache)
    copy_to_local("folder://a.jsonl", cache)
    assert part in os.listdir(cache)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(60)
    (remote / "b.jsonl").write_text("other")
    copy_to_local("folder://b.jsonl", cache)
    assert len(os.listdir(cache)) == 2 and part not in os.listdir(cache)


def test_copies_have_the_mode_of_other_files(remote, cache):
    (remote / "a.jsonl").write_text("x")
    (remote / "plain").write_text("x")
    assert os.stat(copy_to_local("folder://a.jsonl", cache)).st_mode == os.stat(remote / "plain").st_mode


class FullCache(FolderRemote):
    """The disk fills while copying."""

    def get_file(self, rpath, lpath, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", lpath)


def test_errors_of_the_cache_name_it_and_do_not_blame_the_source(remote, cache, tmp_path):
    (remote / "a.jsonl").write_text("x")
    (tmp_path / "file").write_text("no folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DataError, match=r"data\.cache_dir takes copies.*got (File exists|Not a directory) in") as error:
            copy_to_local("folder://a.jsonl", str(place))
        assert not isinstance(error.value, MissingFile)
    fsspec.register_implementation("folder", FullCache, clobber=True)
    with pytest.raises(DataError, match=r"data\.cache_dir takes copies of remote files, got No space left on device"):
        copy_to_local("folder://a.jsonl", cache)
    assert os.listdir(cache) == []
