"""Files that appear whole or not at all, and the one folder of the cache, for this user alone."""

import os
import stat

import pytest

from mezzo import files


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """The folder that XDG_CACHE_HOME names."""
    folder = tmp_path / "home"
    folder.mkdir(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def test_what_is_kept_is_found_again(home):
    with pytest.raises(FileNotFoundError):
        files.kept("below/name")
    assert files.keep("below/name", b"one") == files.keep("below/name", b"two") == files.kept("below/name")
    assert files.kept("below/name").read_bytes() == b"two"
    assert os.listdir(home / "mezzo" / "below") == ["name"]
    assert stat.S_IMODE((home / "mezzo" / "below" / "name").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o720, 0o702])
def test_a_folder_for_others_too_is_not_read_and_becomes_ours_when_it_is_written(home, mode):
    files.keep("name", b"mine")
    (home / "mezzo").chmod(mode)
    with pytest.raises(PermissionError, match=rf"it is not for this user alone: '{home / 'mezzo'}'"):
        files.kept("name")
    files.keep("name", b"other")
    assert files.kept("name").read_bytes() == b"other"
    assert stat.S_IMODE((home / "mezzo").stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_user_s_folder_is_not_read(home):
    files.keep("name", b"theirs")
    os.chown(home / "mezzo", 12345, -1)
    with pytest.raises(PermissionError, match="not for this user alone"):
        files.kept("name")


def test_the_folder_follows_the_xdg_specification(home, monkeypatch, tmp_path):
    assert files.cache_folder() == home / "mezzo"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("relative/path", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert files.cache_folder() == tmp_path / ".cache" / "mezzo"


# Files that a user names -----------------------------------------------------------------------------------------


def test_only_regular_files_are_opened_for_reading(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    os.mkfifo(tmp_path / "pipe")
    with files.opened(tmp_path / "file") as file:
        assert file.read() == b"text"
    with pytest.raises(FileNotFoundError):
        files.opened(tmp_path / "missing")
    with pytest.raises(IsADirectoryError, match=rf"this is a folder\n  where  {tmp_path}\n"):
        files.opened(tmp_path)
    with pytest.raises(OSError, match="this is a pipe"):
        files.opened(tmp_path / "pipe")
    with pytest.raises(OSError, match="this is a device"):
        files.opened("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink(os.devnull, path)], ids=["pipe", "device"])
def test_what_is_no_file_is_not_replaced_by_one(make, tmp_path):
    make(tmp_path / "there")
    before = os.stat(tmp_path / "there")
    with pytest.raises(FileExistsError, match=r"(?s)a file is to be written.*write  the path of a regular file"):
        files.regular_or_new(
            tmp_path / "there"
        )  # which atomic_file() asks first: it is no test's to try that on a device
    after = os.stat(tmp_path / "there")
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)


def test_an_error_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    with files.atomic_file(path) as file:
        file.write(b"old")
    with pytest.raises(TypeError), files.atomic_file(path) as file:
        file.writelines([b"new" * 10_000, None])
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def file_type(descriptor):
        return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(file_type(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    with files.atomic_file(tmp_path / "file") as file:
        file.write(b"new")
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_nobody_reads_more_of_a_file_while_it_is_written_than_when_it_is(mode, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    with files.atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        (beside,) = tmp_path.glob(".file.*.partial")
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"
