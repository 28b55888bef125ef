"""mezzo.save and mezzo.load: the last complete checkpoint is there whatever happens, and damage is told."""

import errno
import io
import os
import pickle
import resource
import signal
import sys
import threading
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mezzo
from mezzo import StateError, files

from ..support.refusals import bits
from .loops import session, train

OLD = {"weights": torch.arange(5.0), "step": 3}
NEW = {"weights": torch.arange(7.0), "step": 4}


def content(path):
    return torch.load(path, weights_only=True)


def is_old(path):
    return content(path)["step"] == 3 and torch.equal(content(path)["weights"], OLD["weights"])


@pytest.fixture
def path(tmp_path):
    checkpoint = tmp_path / "last.pt"
    mezzo.save(checkpoint, **OLD)
    assert is_old(checkpoint)
    return checkpoint


def names(path):
    return sorted(os.listdir(path.parent))


def saved(state, **options):
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


# Writing --------------------------------------------------------------------------------------------------------------


def test_what_is_written_is_what_torch_writes_and_random_numbers_are_left_alone(path):
    before = torch.get_rng_state()
    mezzo.save(path, **NEW)
    assert path.read_bytes() == saved(NEW)
    mezzo.save(str(path), **OLD)
    assert is_old(path)
    assert bits(mezzo.load(path)) == bits(mezzo.load(str(path))) == bits(OLD)
    assert names(path) == ["last.pt"]
    assert torch.equal(torch.get_rng_state(), before)


def raising(error):
    def reduce(self):
        raise error

    return type("Culprit", (), {"__reduce__": reduce})()


@pytest.mark.parametrize("error", [TypeError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_the_old_checkpoint(error, path):
    with pytest.raises(error):
        mezzo.save(path, big=torch.zeros(1000), wrong=raising(error))
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
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert is_old(path)
    assert names(path) == ["last.pt"]
    mezzo.save(path, **NEW)


def test_places_where_nothing_can_be_saved(path, tmp_path, monkeypatch):
    for target, error, words in (
        (tmp_path / "runs" / "x.pt", FileNotFoundError, rf"no folder to save in(.|\n)*os.makedirs\('{tmp_path}/runs'"),
        (tmp_path, IsADirectoryError, r"this is a folder(.|\n)*the path of a file in it, '.*/NAME'"),
    ):
        with pytest.raises(error, match=words):
            mezzo.save(target, **NEW)
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


def test_links_are_followed_as_torch_does(path, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "latest.pt"
    link.symlink_to(path)
    mezzo.save(link, **NEW)
    assert link.is_symlink()
    assert content(path)["step"] == 4
    assert os.listdir(tmp_path / "links") == ["latest.pt"]
    link.unlink()
    link.symlink_to(tmp_path / "first.pt")  # which is not there yet
    mezzo.save(link, **NEW)
    assert content(tmp_path / "first.pt")["step"] == 4
    (tmp_path / "round.pt").symlink_to(tmp_path / "round.pt")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: .*round\.pt"):
        mezzo.save(tmp_path / "round.pt", **NEW)


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
            if not frame.f_code.co_filename.endswith(("mezzo/files.py", "session/checkpoints.py")):
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
def test_a_process_that_is_killed_at_any_line_leaves_one_whole_checkpoint(tmp_path):
    """The old one or, once it is renamed, the new one; training goes on; what is beside it goes with the next."""
    path = tmp_path / "last.pt"
    model, made, amp = session("O2,emulate=true,loss_scale=dynamic(init=1024)", "AdamW")
    parts = {"model": model, "optimizer": made, "amp": amp}
    train(amp, model, 0)
    mezzo.save(path, **parts, number=0)
    old = path.read_bytes()
    train(amp, model, 1)
    mezzo.save(path, **parts, number=1)
    new, seen, left, line = path.read_bytes(), [], [], 0
    path.write_bytes(old)
    assert saved_until_killed(path, {"huge": torch.zeros(2**18), "half": Halves()}, 10**9)
    assert path.read_bytes() == old
    assert len(names(path)) == 2
    while saved_until_killed(path, {**parts, "number": 1}, line):
        seen.append(path.read_bytes())
        left.append(len(names(path)) - 1)
        line += 9
    assert set(seen) <= {old, new}
    assert seen[0] == old
    assert [*seen, path.read_bytes()] == sorted([*seen, new], key=new.__eq__)
    loaded = mezzo.load(path, **parts)
    assert loaded["number"] == 1
    assert names(path) == ["last.pt"]
    assert {*left} == {0, 1}  # those of the processes before are gone
    assert saved_until_killed(path, {"half": Halves()}, 10**9)
    mezzo.save(tmp_path / "other.pt", number=2)  # into this folder
    assert names(path) == ["last.pt", "other.pt"]
    assert not train(amp, model, 2).skipped


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_what_a_living_process_or_another_machine_writes_stays(path, monkeypatch):
    """Also of a process that stands still; names that are not mezzo's stay in any case."""
    with monkeypatch.context() as patched:
        patched.setattr(files, "_here", lambda: ("0" * 8, "1" * 8))
        assert saved_until_killed(path, {"half": Halves()}, 10**9)
    (theirs,) = (name for name in names(path) if name != "last.pt")
    (path.parent / ".theirs.partial").write_bytes(b"")
    begun, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with files.atomic_file(path) as file:
                torch.save(NEW, file)
                file.flush()
                os.write(begun[1], b".")
                os.read(go_on[0], 1)
        finally:
            os._exit(0)
    os.read(begun[0], 1)
    mezzo.save(path.parent / "other.pt", number=1)
    assert len(names(path)) == 5
    with files.atomic_file(path):  # of this process, too
        mezzo.save(path.parent / "other.pt", number=2)
        assert len(names(path)) == 6
    os.write(go_on[1], b".")
    os.waitpid(child, 0)
    assert content(path)["step"] == 4
    mezzo.save(path, **OLD)
    assert names(path) == sorted([".theirs.partial", theirs, "last.pt", "other.pt"])
    for descriptor in (*begun, *go_on):
        os.close(descriptor)


def test_a_file_is_locked_until_it_has_its_name(path, monkeypatch):
    """Another save at the last moment, between its last byte and its name, leaves it."""
    replace, others = os.replace, []

    def replace_after_a_save(one, other):
        if not others:
            others.append(path.parent / "other.pt")
            mezzo.save(others[0], **OLD)
        replace(one, other)

    monkeypatch.setattr(os, "replace", replace_after_a_save)
    mezzo.save(path, **NEW)
    assert content(path)["step"] == 4
    assert names(path) == ["last.pt", "other.pt"]


class SavedMeanwhile:
    """Saves to the same path while it is being saved, as a signal handler may."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        mezzo.save(self.path, inner=True)
        assert content(self.path) == {"inner": True}
        return OrderedDict, ()


def test_saves_to_one_path_do_not_mix(path):
    """One inside another, and those of threads."""
    mezzo.save(path, outer=SavedMeanwhile(path), big=torch.zeros(10_000))
    assert content(path)["outer"] == {}
    assert content(path)["big"].shape == (10_000,)
    failures = []

    def write(number):
        try:
            for _ in range(6):
                mezzo.save(path, number=number, same=torch.full((20_000,), number))
        except BaseException as failure:
            failures.append(failure)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        state = content(path)
        assert "number" not in state or (state["same"] == state["number"]).all()
    for writer in writers:
        writer.join()
    assert failures == []
    assert content(path)["number"] in range(3)
    assert names(path) == ["last.pt"]


# Reading --------------------------------------------------------------------------------------------------------------


def outcome(path, data=None, expected=None):
    """Load a damaged file: what is raised, or "the same"."""
    if data is not None:
        path.write_bytes(data)
    try:
        loaded = mezzo.load(path)
    except StateError as error:
        return str(error)
    assert bits(loaded) == expected
    return "the same"


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)], ids=["one of each byte", "all"])
def test_every_flipped_bit_is_told_or_changes_nothing(path, step):
    """In the data and in all that says where it lies; of padding, which is the letter Z, one bit of each byte."""
    whole, expected = path.read_bytes(), bits(OLD)
    counts = Counter()
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(whole):
            padding = whole[at - 1 : at + 2] == b"ZZZ"
            for bit in (at % 8,) if padding else range(at % step, 8, step):
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit]))
                result = outcome(path, expected=expected)
                counts[result.partition("\n")[0]] += 1
                assert result == "the same" or (f"\n  where  {path}\n  why    " in result and not padding)
            file.seek(at)
            file.write(bytes([byte]))
    for name, size in (("data/0", 20), ("data.pkl", 100), ("byteorder", 6)):
        assert counts[f"the record 'archive/{name}' of the checkpoint is damaged"] > 8 / step * size
    assert sum(number for words, number in counts.items() if words != "the same") > 8 / step * 180
    assert counts["the same"] > 300


def test_a_record_that_one_bit_calls_a_folder_is_damaged(path):
    """Of such a record torch hands out memory as it finds it."""
    data = bytearray(path.read_bytes())
    name = b"archive/data/0"
    entry = data.rindex(name) - 46  # of the central directory
    assert data[entry : entry + 4] == b"PK\x01\x02"
    data[entry + 38] |= 0x10  # the folder bit of its external attributes
    assert outcome(path, bytes(data)).startswith("the record 'archive/data/0' of the checkpoint is damaged\n")


def test_torch_loads_such_a_file(path):
    """What the checksum is for; when torch looks at it, this test will say so."""
    whole = path.read_bytes()
    at = whole.index(OLD["weights"].numpy().tobytes())
    path.write_bytes(whole[: at + 2] + b"\x40" + whole[at + 3 :])
    assert not torch.equal(content(path)["weights"], OLD["weights"])
    with pytest.raises(StateError, match=r"the record 'archive/data/0' of the checkpoint is damaged") as caught:
        mezzo.load(path)
    assert str(path) in str(caught.value)


LARGER = {f"layer{n}.weight": torch.randn(40, 30, generator=torch.Generator().manual_seed(n)) for n in range(8)}
LARGER_BYTES = saved(LARGER)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(LARGER_BYTES) - 1), st.integers(1, 255)), max_size=4),
    st.integers(0, len(LARGER_BYTES) - 1), st.integers(1, 5000), st.sampled_from(["as it is", "zeros", "cut", "twice"]),
)  # fmt: skip
def test_damage_of_a_larger_file(tmp_path_factory, harms, begin, length, change):
    data = bytearray(LARGER_BYTES)
    for at, mask in harms:
        data[at] ^= mask
    piece = bytes(data[begin : begin + length])
    other = {"as it is": piece, "zeros": bytes(len(piece)), "cut": b"", "twice": piece + piece}[change]
    data = bytes(data[:begin]) + other + bytes(data[begin + length :])
    outcome(tmp_path_factory.mktemp("larger") / "x.pt", data, bits(LARGER))


class Program:
    def __reduce__(self):
        return os.getpid, ()


def test_what_is_loaded_is_what_was_asked_for(path):
    assert mezzo.load(path, map_location="meta")["weights"].device.type == "meta"
    model = torch.nn.Linear(2, 1)
    mezzo.save(path, model=torch.nn.Linear(2, 1), step=3)
    before = model.weight.clone()
    with pytest.raises(KeyError):  # and nothing was loaded
        mezzo.load(path, model=model, optimizer=torch.optim.SGD(model.parameters()))
    assert torch.equal(model.weight, before)
    mezzo.save(path, weight=torch.zeros(1), program=Program())
    with pytest.raises(pickle.UnpicklingError, match="posix"):
        mezzo.load(path)
    assert mezzo.load(path, weights_only=False)["program"] == os.getpid()


def test_checksums_are_written_whatever_other_files_have(path):
    torch.serialization.set_crc32_options(False)
    try:
        mezzo.save(path, **OLD)
        assert torch.serialization.get_crc32_options() is False
        theirs = saved(OLD)
    finally:
        torch.serialization.set_crc32_options(True)
    assert bits(mezzo.load(path)) == bits(OLD)
    assert "is damaged" in outcome(path, theirs)
