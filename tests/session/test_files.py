"""mezzo.save: whatever happens while it writes, the last complete checkpoint is there."""

import errno
import io
import os
import resource
import signal
import socket
import stat
import sys
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

import mezzo

from .loops import session, train

OLD = {"weights": torch.arange(5.0), "step": 3}
NEW = {"weights": torch.arange(7.0), "step": 4}


def content(path):
    return torch.load(path, weights_only=True)


def is_old(path):
    return content(path)["step"] == 3 and torch.equal(content(path)["weights"], OLD["weights"])


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "last.pt"
    mezzo.save(found, **OLD)
    assert is_old(found)
    return found


def names(path):
    return sorted(os.listdir(path.parent))


def test_what_is_written_is_what_torch_writes(path):
    mezzo.save(path, **NEW)
    theirs = io.BytesIO()
    torch.save(NEW, theirs)
    assert path.read_bytes() == theirs.getvalue()
    mezzo.save(str(path), **OLD)
    assert is_old(path)
    assert names(path) == ["last.pt"]


class Unpicklable:
    def __reduce__(self):
        raise TypeError("cannot pickle this")


class Interrupted:
    def __reduce__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("culprit, error", [(Unpicklable, TypeError), (Interrupted, KeyboardInterrupt)])
def test_an_error_while_writing_leaves_the_old_checkpoint(culprit, error, path):
    with pytest.raises(error):
        mezzo.save(path, big=torch.zeros(1000), wrong=culprit())
    assert is_old(path)
    assert names(path) == ["last.pt"]


@pytest.mark.parametrize("state", [torch.zeros(1_000_000), [torch.zeros(1000) for _ in range(1000)]])
def test_a_full_disk_leaves_the_old_checkpoint_and_is_told_as_what_it_is(state, path):
    """Not as what torch makes of it, "unexpected pos 64 vs 0"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            mezzo.save(path, state=state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(path)
    assert is_old(path)
    assert names(path) == ["last.pt"]
    mezzo.save(path, **NEW)


def test_a_disk_that_fills_up_at_the_end_leaves_the_old_checkpoint(path, monkeypatch):
    """Some file systems say so only when they are asked to write for good."""

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        mezzo.save(path, **NEW)
    assert is_old(path)
    assert names(path) == ["last.pt"]


def test_the_file_is_on_the_disk_before_it_is_renamed(path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append(kind(descriptor)), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths, **at: (calls.append("rename"), replace(*paths, **at)))
    mezzo.save(path, **NEW)
    assert calls == ["file", "rename", "folder"]


def kind(descriptor):
    return "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"no folder to save in(.|\n)*os.makedirs\('{tmp_path}/runs'"):
        mezzo.save(tmp_path / "runs" / "last.pt", **NEW)
    assert os.listdir(tmp_path) == []


def test_a_folder_instead_of_a_file(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"this is a folder(.|\n)*the path of a file in it, '.*/NAME'"):
        mezzo.save(tmp_path, **NEW)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(path, monkeypatch):
    if os.geteuid() == 0:  # to whom nothing is read-only
        opened = os.open

        def refuse(name, flags, *mode, **options):
            if flags & os.O_CREAT:
                raise PermissionError(13, "Permission denied", str(name))
            return opened(name, flags, *mode, **options)

        monkeypatch.setattr(os, "open", refuse)
    else:
        path.parent.chmod(0o500)
    with pytest.raises(PermissionError, match=str(path.parent)):
        mezzo.save(path, **NEW)
    monkeypatch.undo()
    path.parent.chmod(0o700)
    assert is_old(path)
    assert names(path) == ["last.pt"]


class Looks:
    """Sees, while it is being saved, who may read what has been written so far."""

    modes = None

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        self.modes.extend(stat.S_IMODE(each.stat().st_mode) for each in self.path.parent.glob(".*.partial"))
        return OrderedDict, ()


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_permissions_are_kept_also_while_writing(mode, path, monkeypatch):
    path.chmod(mode)
    monkeypatch.setattr(Looks, "modes", [])
    mezzo.save(path, **NEW, looks=Looks(path))
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert content(path)["step"] == 4
    assert Looks.modes == [0o600]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    before = os.umask(0o027)
    try:
        mezzo.save(tmp_path / "new.pt", **NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.pt").stat().st_mode) == 0o640


def test_a_link_is_followed_as_torch_does(path, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest.pt"
    link.symlink_to(path)
    mezzo.save(link, **NEW)
    assert link.is_symlink()
    assert content(path)["step"] == 4
    assert os.listdir(tmp_path / "links") == ["latest.pt"]


def test_a_link_that_leads_nowhere_yet_is_followed_too(tmp_path):
    (tmp_path / "latest.pt").symlink_to(tmp_path / "first.pt")
    mezzo.save(tmp_path / "latest.pt", **NEW)
    assert content(tmp_path / "first.pt")["step"] == 4
    (tmp_path / "round.pt").symlink_to(tmp_path / "round.pt")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*round\.pt"):
        mezzo.save(tmp_path / "round.pt", **NEW)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a device"])
def test_what_is_no_file_is_never_replaced(kind, tmp_path):
    place = tmp_path / "place"
    with socket.socket(socket.AF_UNIX) as made:
        if kind == "pipe":
            os.mkfifo(place)
        elif kind == "socket":
            made.bind(str(place))
        elif kind == "device":
            place = Path("/dev/null") if os.geteuid() else place
            if not place.exists():
                try:
                    os.mknod(place, stat.S_IFCHR | 0o666, os.makedev(1, 3))
                except OSError:
                    pytest.skip("no device can be made here")
        else:
            place.symlink_to("/dev/zero")
        before = os.lstat(place)
        told = rf"this is a {kind.split()[-1]}\n  where  (.|\n)*  why    a new file under its name would replace it\n"
        with pytest.raises(FileExistsError, match=told):
            mezzo.save(place, **NEW)
        assert os.path.samestat(os.lstat(place), before)
        assert os.listdir(tmp_path) in (["place"], [])


def test_names_may_be_as_long_as_the_file_system_takes(tmp_path):
    for name in ("n" * 237, "n" * 238, "n" * 255, "é" * 127):
        mezzo.save(tmp_path / name, **OLD)
        mezzo.save(tmp_path / name, **NEW)
        assert content(tmp_path / name)["step"] == 4
        assert os.listdir(tmp_path) == [name]
        (tmp_path / name).unlink()


def test_random_numbers_are_left_alone(path):
    before = torch.get_rng_state()
    mezzo.save(path, **NEW)
    assert torch.equal(torch.get_rng_state(), before)


# Killed while it writes -----------------------------------------------------------------------------------


class Halves:
    """Ends the process that pickles it: a half of the file is written then."""

    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def saved_until_killed(path, parts, line):
    """Save in a child that is killed at a certain line of the two files that write; return whether it was."""
    child = os.fork()
    if child == 0:
        left = line

        def at_each_line(frame, event, _):
            nonlocal left
            if not frame.f_code.co_filename.endswith(("mezzo/files.py", "session/files.py")):
                return None
            left -= event == "line"
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return at_each_line

        try:
            sys.settrace(at_each_line)
            mezzo.save(path, **parts)
        finally:
            os._exit(0)  # never back into the code of its parent
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.slow)], ids=["some lines", "all"])
def test_a_process_that_is_killed_at_any_line_leaves_one_whole_checkpoint(step, tmp_path):
    """The old one or, once it is renamed, the new one; training goes on from it; what lies beside is no checkpoint."""
    path = tmp_path / "last.pt"
    model, made, amp = session("O2,emulate=true,loss_scale=dynamic(init=1024)", "AdamW")
    parts = {"model": model, "optimizer": made, "amp": amp}
    train(amp, model, 0)
    mezzo.save(path, **parts, number=0)
    old = path.read_bytes()
    train(amp, model, 1)
    mezzo.save(path, **parts, number=1)
    new, seen, line = path.read_bytes(), [], 0
    path.write_bytes(old)
    assert saved_until_killed(path, {"huge": torch.zeros(2**18), "half": Halves()}, 10**9)
    assert path.read_bytes() == old
    while saved_until_killed(path, {**parts, "number": 1}, line):
        seen.append(path.read_bytes())
        line += step
    assert set(seen) <= {old, new}
    assert seen[0] == old
    assert [*seen, path.read_bytes()] == sorted([*seen, new], key=new.__eq__)
    found = mezzo.load(path, **parts)
    assert found["number"] == 1
    assert all(each.endswith(".partial") for each in names(path) if each != "last.pt")
    assert not train(amp, model, 2).skipped


# Saves that meet ---------------------------------------------------------------------------------------


class SavedMeanwhile:
    """Saves to the same path while it is being saved, as a signal handler may."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        mezzo.save(self.path, inner=True)
        assert content(self.path) == {"inner": True}
        return OrderedDict, ()


def test_a_save_inside_a_save(path):
    mezzo.save(path, outer=SavedMeanwhile(path), big=torch.zeros(10_000))
    assert content(path)["outer"] == {}
    assert content(path)["big"].shape == (10_000,)
    assert names(path) == ["last.pt"]


def test_threads_that_save_to_one_path_do_not_mix(path):
    seen, failures = set(), []

    def write(number):
        try:
            for _ in range(10):
                mezzo.save(path, number=number, same=torch.full((20_000,), number))
        except BaseException as failure:
            failures.append(failure)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        state = content(path)
        if "number" in state:
            assert (state["same"] == state["number"]).all()
            seen.add(state["number"])
    for each in writers:
        each.join()
    assert failures == []
    assert content(path)["number"] in range(4)
    assert names(path) == ["last.pt"]
