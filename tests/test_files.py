"""What is kept for later processes is read only where no other user can have put it."""

import os
import stat

import pytest

from mezzo import files

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """The folder that XDG_CACHE_HOME names."""
    found = tmp_path / "home"
    found.mkdir(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(found))
    return found


def test_what_is_kept_is_found_again(home):
    with pytest.raises(FileNotFoundError):
        files.kept("below/name")
    files.keep("below/name", b"one")
    files.keep("below/name", b"two")
    assert files.kept("below/name") == b"two"
    assert os.listdir(home / "mezzo" / "below") == ["name"]
    assert stat.S_IMODE((home / "mezzo" / "below" / "name").stat().st_mode) == 0o600


def places(home):
    return {"home": home, "mezzo": home / "mezzo", "below": home / "mezzo" / "below", "name": home / "mezzo/below/name"}


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
@pytest.mark.parametrize("place", ["home", "mezzo", "below", "name"])
def test_what_others_may_write_to_is_neither_read_nor_written(home, place, mode):
    files.keep("below/name", b"mine")
    places(home)[place].chmod(mode)
    with pytest.raises(PermissionError, match=rf"other users may write to it: '{places(home)[place]}'"):
        files.kept("below/name")
    if place != "name":
        with pytest.raises(PermissionError, match="other users may write to it"):
            files.keep("below/name", b"other")
    else:  # a new file of ours replaces it
        files.keep("below/name", b"other")
        assert files.kept("below/name") == b"other"


@NEEDS_ROOT
@pytest.mark.parametrize("place", ["home", "mezzo", "below", "name"])
def test_what_another_user_owns_is_not_read(home, place):
    files.keep("below/name", b"mine")
    os.chown(places(home)[place], 12345, -1)
    with pytest.raises(PermissionError, match=rf"it belongs to another user, 12345: '{places(home)[place]}'"):
        files.kept("below/name")


def test_in_a_sticky_folder_that_all_may_write_to_only_owners_move_what_is_theirs(home):
    home.chmod(0o1777)
    files.keep("name", b"mine")
    assert files.kept("name") == b"mine"
    if os.geteuid() == 0:
        os.chown(home / "mezzo", 12345, -1)  # made before ours
        with pytest.raises(PermissionError, match="another user"):
            files.kept("name")


@NEEDS_ROOT
def test_links_are_followed_where_only_we_can_have_made_them(home, tmp_path):
    files.keep("below/name", b"mine")
    (home / "mezzo" / "below").rename(tmp_path / "moved")
    link = home / "mezzo" / "below"
    for place in (tmp_path / "moved", "../../moved"):
        link.symlink_to(place)
        assert files.kept("below/name") == b"mine"
        link.unlink()
    link.symlink_to(tmp_path / "moved")
    os.chown(link, 12345, -1, follow_symlinks=False)
    with pytest.raises(PermissionError, match="another user"):
        files.kept("below/name")
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match="Too many levels"):
        files.kept("below/name")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_a_regular_file_is_read(home, kind):
    files.keep("name", b"mine")
    place = home / "mezzo" / "name"
    place.rename(home / "mezzo" / "other")
    if kind == "link":
        place.symlink_to(home / "mezzo" / "other")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(OSError, match=r"levels of symbolic links|this is a (pipe|folder)"):
        files.kept("name")


@NEEDS_ROOT
def test_a_folder_exchanged_between_the_check_and_the_use_is_not_entered(home, monkeypatch, tmp_path):
    """At every call that looks at something or opens it, another user puts a folder of their own in its place."""
    files.keep("below/name", b"mine")
    theirs = tmp_path / "theirs"
    (theirs / "below").mkdir(parents=True)
    (theirs / "below" / "name").write_bytes(b"theirs")
    for path in (theirs, theirs / "below", theirs / "below" / "name"):
        os.chown(path, 12345, -1)
    calls = 0

    def attacked(real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == attacked_call:
                (home / "mezzo").rename(home / "aside")
                (home / "mezzo").symlink_to(theirs)
            return real(*args, **options)

        return call

    attacks = len((home / "mezzo" / "below" / "name").parts)  # each folder is looked at, and the file opened
    for attacked_call in range(1, attacks + 1):  # noqa: B007 - what the attack looks at
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", attacked(os.stat))
            patch.setattr(os, "open", attacked(os.open))
            try:
                found = files.kept("below/name")
            except OSError:
                found = None
        assert found in (None, b"mine")
        (home / "mezzo").unlink()
        (home / "aside").rename(home / "mezzo")
    assert files.kept("below/name") == b"mine"


def test_a_private_folder_is_where_nobody_else_can_exchange_it(home, monkeypatch, tmp_path):
    with files.private_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(files.tempfile, "tempdir", str(shared))
    with files.private_folder() as folder:
        assert folder.parent == home / "mezzo"
    assert os.listdir(shared) == os.listdir(home / "mezzo") == []
    home.chmod(0o777)
    with pytest.raises(PermissionError), files.private_folder():
        pass
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(files.Path, "home", homeless)
    with pytest.raises(OSError, match="Could not determine home"), files.private_folder():
        pass


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
        files.regular_or_new(tmp_path / "there")  # which whole() asks first: it is no test's to try that on a device
    after = os.stat(tmp_path / "there")
    assert (after.st_mode, after.st_ino, after.st_rdev) == (before.st_mode, before.st_ino, before.st_rdev)


def test_an_error_in_the_block_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    with files.whole(path) as file:
        file.write(b"old")
    with pytest.raises(TypeError), files.whole(path) as file:
        file.writelines([b"new" * 10_000, None])
    assert path.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls, fsync, replace = [], os.fsync, os.replace

    def kind(descriptor):
        return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"

    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(kind(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    with files.whole(tmp_path / "file") as file:
        file.write(b"new")
    assert calls == ["file", "rename", "folder"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_nobody_reads_more_of_a_file_while_it_is_written_than_when_it_is(mode, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    with files.whole(path) as file:
        file.write(b"new")
        file.flush()
        (beside,) = tmp_path.glob(".file.*.partial")
        assert stat.S_IMODE(beside.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_bytes() == b"new"
