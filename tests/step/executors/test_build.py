"""Kernels in C++: compiled once for a processor, kept on disk, never half there."""

import subprocess

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step.executors.cpp import build

SOURCE = """
#include <cstdint>
extern "C" void kernel(float* values, int64_t count, const float* factor) {
    for (int64_t i = 0; i < count; ++i) values[i] *= *factor;
}
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build.built.cache_clear()
    yield tmp_path / "mezzo" / "kernels"
    build.built.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    found, compile_ = [], build._compiled
    monkeypatch.setattr(build, "_compiled", lambda *args: found.append(args) or compile_(*args))
    return found


def run(source=SOURCE):
    values = torch.tensor([1.0, -2.0])
    build.built(source)(values, 2, torch.tensor(0.5))
    return values.tolist()


def test_what_was_compiled_is_found_again(folder, compilations):
    assert run() == run() == [0.5, -1.0]
    build.built.cache_clear()  # as another process would
    assert run() == [0.5, -1.0]
    assert len(compilations) == 1
    assert [path.suffix for path in folder.iterdir()] == [".so"]


def test_another_source_another_compiler_and_another_processor_are_compiled_for(folder, compilations, monkeypatch):
    run()
    run(SOURCE.replace("*=", "/="))
    monkeypatch.setenv("CXX", "g++ -DOTHER")
    build.built.cache_clear()
    run()
    monkeypatch.setattr(build, "_asked", lambda command: "-march=another")
    build.built.cache_clear()
    run()
    assert len(compilations) == len(list(folder.iterdir())) == 4


def as_another_process(source=SOURCE):
    build.built.cache_clear()
    return run(source)


def test_a_damaged_file_is_compiled_anew(folder, compilations):
    """Whatever the damage is: to load a truncated program, or one with zeroed pages, would kill the process."""
    run()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    harms = [b"not a library", b"", whole[: len(whole) // 2], whole[:-1]]
    harms += [bytes(4096) + whole[4096:], whole[:4096] + bytes(4096) + whole[8192:]]
    harms += [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), len(whole) // 4)]
    for number, harm in enumerate(harms, start=2):
        path.write_bytes(harm)
        assert as_another_process() == [0.5, -1.0]
        assert len(compilations) == number
        assert path.read_bytes() == whole or as_another_process() == [0.5, -1.0]
        assert list(folder.iterdir()) == [path]


def test_a_program_kept_under_another_name_is_not_taken(folder, compilations):
    run()
    (first,) = folder.iterdir()
    run(SOURCE.replace("*=", "+="))
    (second,) = set(folder.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert as_another_process(SOURCE.replace("*=", "+=")) == [1.5, -1.5]
    assert len(compilations) == 3


def test_what_was_loaded_stays_whatever_becomes_of_the_file(folder):
    run()
    (path,) = folder.iterdir()
    with path.open("r+b") as file:
        file.truncate(10)  # of a file mapped into a process: SIGBUS at the next call
    assert run() == [0.5, -1.0]


@pytest.mark.parametrize("in_memory", [True, False])
def test_no_two_programs_are_taken_for_one(folder, monkeypatch, in_memory):
    """The loader compares names, and the descriptors of files in memory have the same number again and again."""
    if not in_memory:
        monkeypatch.delattr(build.os, "memfd_create")
    sources = [SOURCE.replace("*factor", f"*factor + {number}") for number in range(5)]
    for _ in range(2):
        assert [as_another_process(source) for source in sources] == [[0.5 + n, -1.0 - 2 * n] for n in range(5)]


def test_what_does_not_compile_is_told_and_leaves_nothing(folder):
    with pytest.raises(UnsupportedError, match=r"does not compile\n  where  .*g\+\+.*-fopenmp") as caught:
        build.built("int kernel( {")
    assert "  why    <stdin>:1:" in str(caught.value)
    assert "error" in str(caught.value)
    assert "write  CXX=the path of another C++ compiler with OpenMP" in str(caught.value)
    assert not folder.exists()


def test_an_interrupted_compilation_leaves_nothing(folder, monkeypatch):
    real = subprocess.run

    def interrupted(command, **options):
        done = real(command, **options)
        if "-o" in command:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not folder.exists()


def test_without_a_cache_kernels_last_as_long_as_the_process(monkeypatch, tmp_path, compilations, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        assert run() == run() == [0.5, -1.0]
    assert len(compilations) == 1
    assert (tmp_path / "file").read_text() == ""
    assert "an optimizer kernel is not kept for later processes: [Errno 20]" in caplog.text


def test_without_a_home_kernels_are_compiled_for_the_process(monkeypatch, compilations):
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.files.Path, "home", homeless)
    assert as_another_process() == as_another_process() == [0.5, -1.0]
    assert len(compilations) == 2


def test_a_program_that_no_loader_takes_is_told(monkeypatch, folder):
    monkeypatch.setattr(build, "_loaded", lambda program: None)
    with pytest.raises(UnsupportedError, match=r"cannot be loaded\n  where  .*g\+\+\n(?s:.*)write  CXX=.*TMPDIR="):
        run()
    assert not folder.exists()


@pytest.mark.parametrize(
    "platform, setting, where",
    [
        ("linux", "/nowhere/g++ -g", r"CXX=/nowhere/g\+\+ -g"),
        ("linux", "", "linux, no-such-compiler"),
        ("darwin", "", "darwin, no-such-compiler"),
        ("darwin", "g++", r"CXX=g\+\+"),
    ],
)
def test_without_a_compiler(monkeypatch, platform, setting, where):
    monkeypatch.setattr(build.sys, "platform", platform)
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("CXX", setting)
    with pytest.raises(
        UnsupportedError, match=rf"no C\+\+ compiler for optimizer kernels\n  where  {where}\n"
    ) as caught:
        run()
    assert "apt install g++" in str(caught.value)


def test_our_folder_is_for_us_alone(folder):
    before = build.os.umask(0)
    try:
        run()
    finally:
        build.os.umask(before)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_cache_that_cannot_be_written_to_is_still_read(folder, compilations, monkeypatch):
    run()

    def full(name, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.files, "keep", full)
    assert as_another_process() == [0.5, -1.0]
    assert len(compilations) == 1
    assert run(SOURCE.replace("*=", "+=")) == [1.5, -1.5]
    assert len(list(folder.iterdir())) == 1


def test_the_compiler_works_where_no_other_user_can_write(folder, monkeypatch):
    seen, real = [], subprocess.run

    def looked_at(command, **options):
        if "-o" in command:
            place = build.Path(command[-1]).parent
            seen.append((place.stat().st_mode & 0o777, options["env"]["TMPDIR"] == str(place), place))
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", looked_at)
    run()
    ((mode, is_temporary, place),) = seen
    assert (mode, is_temporary) == (0o700, True)
    assert not place.exists()


def test_nowhere_to_be(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError("no space")

    monkeypatch.setattr(build.tempfile, "mkdtemp", refuse)
    with pytest.raises(UnsupportedError, match=r"nowhere to be compiled\n  why    no space\n  write  TMPDIR="):
        run()


def test_a_setting_that_is_no_command(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(
        UnsupportedError, match=r"CXX is no command\n  where  CXX=g\+\+ '\n  why    No closing quotation"
    ):
        run()
    text = tmp_path / "text"
    text.write_text("")
    text.chmod(0o700)
    monkeypatch.setenv("CXX", str(text))
    with pytest.raises(UnsupportedError, match=rf"does not run\n  where  {text}\n  why    .*Exec format error"):
        run()


def test_a_compiler_that_does_not_tell_what_it_makes_is_known_by_the_processor(monkeypatch):
    monkeypatch.setattr(build, "_run", lambda command: subprocess.CompletedProcess(command, 1, "", "unknown option"))
    build._asked.cache_clear()
    try:
        told = build._asked(("cc",))
    finally:
        build._asked.cache_clear()
    assert "flags" in told or "Features" in told
    assert "MHz" not in told


def test_the_lock_of_the_interpreter_is_released():
    import threading

    waiting = """
    #include <atomic>
    #include <cstdint>
    extern "C" void kernel(int64_t* flag) {
        auto* shared = reinterpret_cast<std::atomic<int64_t>*>(flag);
        while (!shared->load()) {}
    }
    """
    flag = torch.zeros((), dtype=torch.int64)
    kernel = build.built(waiting)
    thread = threading.Thread(target=lambda: kernel(flag), daemon=True)
    thread.start()
    flag.fill_(1)  # which a kernel that kept the lock would wait for, for ever
    thread.join(10)
    assert not thread.is_alive()
