"""Kernels in C++: compiled once for a processor, kept on disk, never half there."""

import subprocess

import pytest
import torch

from mezzo import UnsupportedError, compiled

from .support.refusals import refused

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
    compiled.built.cache_clear()
    yield tmp_path / "mezzo" / "kernels"
    compiled.built.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    results, compile_ = [], compiled._compiled
    monkeypatch.setattr(compiled, "_compiled", lambda *args: results.append(args) or compile_(*args))
    return results


def run(source=SOURCE):
    values = torch.tensor([1.0, -2.0])
    compiled.built(source)(values, 2, torch.tensor(0.5))
    return values.tolist()


def as_another_process(source=SOURCE):
    compiled.built.cache_clear()
    return run(source)


def test_what_was_compiled_is_found_again_and_whatever_is_another_is_compiled_for(folder, compilations, monkeypatch):
    """Another source, another compiler and another processor."""
    assert run() == run() == as_another_process() == [0.5, -1.0]
    assert len(compilations) == 1
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    run(SOURCE.replace("*=", "/="))
    monkeypatch.setenv("CXX", "g++ -DOTHER")
    as_another_process()
    monkeypatch.setattr(compiled, "_compiler_identity", lambda command: "-march=another")
    as_another_process()
    assert len(compilations) == len(list(folder.iterdir())) == 4


def test_a_damaged_file_is_compiled_anew(folder, compilations):
    """To load a truncated program would kill the process."""
    run()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    harms = [b"not a library", b"", whole[: len(whole) // 2], whole[:-1]]
    harms += [whole[:at] for at in range(1, len(whole), len(whole) // 5)] + [bytes(4096) + whole[4096:]]
    for number, harm in enumerate(harms, start=2):
        path.unlink()  # in the file itself this process runs
        path.write_bytes(harm)
        assert as_another_process() == [0.5, -1.0]
        assert len(compilations) == number
        assert path.read_bytes() == whole or as_another_process() == [0.5, -1.0]
        assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("is_kept", [True, False])
def test_no_two_programs_are_taken_for_one(folder, monkeypatch, is_kept):
    """The loader compares names."""
    if not is_kept:
        monkeypatch.setattr(compiled.files, "keep", refuse)
    sources = [SOURCE.replace("*factor", f"*factor + {number}") for number in range(2)]
    for _ in range(2):
        assert [as_another_process(source) for source in sources] == [[0.5, -1.0], [1.5, -3.0]]


def test_without_a_cache_kernels_last_as_long_as_the_process(monkeypatch, tmp_path, compilations, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        assert run() == run() == [0.5, -1.0]
    assert len(compilations) == 1
    assert (tmp_path / "file").read_text() == ""
    assert "a compiled kernel is not kept for later processes: [Errno 20]" in caplog.text


def test_our_folder_and_where_the_compiler_works_are_for_us_alone(folder, monkeypatch):
    seen, real = [], subprocess.run

    def looked_at(command, **options):
        if "-o" in command:
            working = compiled.Path(command[-1]).parent
            seen.append((working.stat().st_mode & 0o777, options["env"]["TMPDIR"] == str(working), working))
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", looked_at)
    before = compiled.os.umask(0)
    try:
        run()
    finally:
        compiled.os.umask(before)
    (path,), ((mode, is_temporary, working),) = folder.iterdir(), seen
    assert (folder.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert (mode, is_temporary) == (0o700, True)
    assert not working.exists()


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
    kernel = compiled.built(waiting)
    thread = threading.Thread(target=lambda: kernel(flag), daemon=True)
    thread.start()
    flag.fill_(1)  # which a kernel that kept the lock would wait for, for ever
    thread.join(10)
    assert not thread.is_alive()


def refuse(*_, **__):
    raise OSError("no space")


#: What is wrong, by name: an attribute of the room and its value, the setting CXX, the source, and the words.
REFUSED = {
    "does not compile": (None, None, None, "int kernel( {",
        [r"does not compile", "-fopenmp", "why    <stdin>:1:", "error", "write  CXX=the path of another C++ compiler"]),
    "no loader takes it": (compiled, "_loaded", lambda program: None, SOURCE, ["cannot be loaded", "g++", "TMPDIR="]),
    "nowhere to be": (compiled.tempfile, "mkdtemp", refuse, SOURCE,
        ["nowhere to be compiled", "why    no space", "write  TMPDIR="]),
    "no compiler": (compiled, "_COMPILERS", ("no-such-compiler",), SOURCE,
        ["no C++ compiler for kernels", "linux, no-such-compiler", "apt install g++"]),
    "CXX is nowhere": (None, "/nowhere/g++ -g", None, SOURCE,
        ["no C++ compiler for kernels", "CXX=/nowhere/g++ -g", "apt install g++"]),
    "CXX is no command": (None, "g++ '", None, SOURCE, ["CXX is no command", "CXX=g++ '", "No closing quotation"]),
    "CXX does not run": (None, "{tmp}/text", None, SOURCE, ["does not run", "Exec format error"]),
}  # fmt: skip


@pytest.mark.skipif(compiled.sys.platform != "linux", reason="the words are Linux's")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_told_and_leaves_nothing(folder, monkeypatch, tmp_path, case):
    target, name, value, source, words = REFUSED[case]
    (tmp_path / "text").write_text("")
    (tmp_path / "text").chmod(0o700)
    if target is not None:
        monkeypatch.setattr(target, name, value)
    elif name is not None:
        monkeypatch.setenv("CXX", name.replace("{tmp}", str(tmp_path)))
    with refused(UnsupportedError, *words):
        compiled.built(source)
    assert not folder.exists() or not list(folder.iterdir())
