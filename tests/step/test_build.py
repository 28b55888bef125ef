"""Kernels in C++: compiled once for a processor, kept on disk, never half there."""

import subprocess

import pytest
import torch

from mezzo import UnsupportedError
from mezzo.step.kernels import build

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
    found, compile_ = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda *args: found.append(args) or compile_(*args))
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


def test_a_damaged_file_is_compiled_anew(folder, compilations, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(build, "_loaded", lambda path: None)  # a process keeps what it has loaded once
        with pytest.raises(UnsupportedError, match="cannot be loaded"):
            run()
    (path,) = folder.iterdir()
    path.write_bytes(b"not a library")
    compilations.clear()
    assert run() == [0.5, -1.0]
    assert len(compilations) == 1


def test_what_does_not_compile_is_told_and_leaves_nothing(folder):
    with pytest.raises(UnsupportedError, match=r"does not compile\n  where  .*g\+\+.*-fopenmp") as caught:
        build.built("int kernel( {")
    assert "  why    <stdin>:1:" in str(caught.value)
    assert "error" in str(caught.value)
    assert "write  CXX=the path of another C++ compiler with OpenMP" in str(caught.value)
    assert list(folder.iterdir()) == []


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
    assert list(folder.iterdir()) == []


def test_without_a_folder_to_write_to_kernels_last_as_long_as_the_process(monkeypatch, tmp_path, compilations):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run() == [0.5, -1.0]
    ((_, _, path),) = compilations
    assert path.parent == build._process_folder()
    assert (tmp_path / "file").read_text() == ""


def test_a_folder_without_leave_to_run_programs_is_told(monkeypatch, folder):
    monkeypatch.setattr(build, "_loaded", lambda path: None)
    with pytest.raises(
        UnsupportedError, match=rf"cannot be loaded\n  where  {folder}/.*\n(?s:.*)write  XDG_CACHE_HOME="
    ):
        run()


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


def test_a_folder_that_others_may_write_to_is_nothing_to_load_from(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert run() == [0.5, -1.0]
    assert list(folder.iterdir()) == []
    assert list(build._process_folder().glob("*.so"))


def test_our_folder_is_for_us_alone(folder):
    run()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_full_folder_that_cannot_be_written_to_is_still_read(folder, compilations, monkeypatch):
    run()
    access = build.os.access
    monkeypatch.setattr(build.os, "access", lambda path, mode: path != folder and access(path, mode))
    build.built.cache_clear()
    assert run() == [0.5, -1.0]
    assert len(compilations) == 1
    assert run(SOURCE.replace("*=", "+=")) == [1.5, -1.5]
    assert compilations[1][2].parent == build._process_folder()


def test_a_child_does_not_lose_its_parent_s_folder(monkeypatch, tmp_path):
    path = tmp_path / "kernels"
    path.mkdir()
    build._remove(path, build.os.getpid() + 1)
    assert path.exists()
    build._remove(path, build.os.getpid())
    assert not path.exists()


def test_nowhere_to_be(monkeypatch, tmp_path):
    def refuse(**_):
        raise OSError("no space")

    monkeypatch.setattr(build, "_own_folder", lambda: None)
    monkeypatch.setattr(build.tempfile, "mkdtemp", refuse)
    build._made_for.cache_clear()
    with pytest.raises(UnsupportedError, match=r"nowhere to be\n  why    no space\n  write  XDG_CACHE_HOME"):
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
