"""A compiled library appears whole or not at all, a broken one is built again, and no compiler outlives its user."""

import _ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp4dse.kernels import compiling, native, native_library

COMPILING = Path(compiling.__file__)
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through prctl, and files are ELF's")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own with the library in it, and a compiler that copies the one that was built before."""
    assert native.why_not_native() is None
    built = native_library._folder() / f"native-{native_library._key()}.so"
    compiler = program(
        tmp_path / "c++", f'[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\ncp {built} $2'
    )
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for function in native_library.library, native.why_not_native:
        function.cache_clear()
    yield native_library._folder() / f"native-{native_library._key()}.so"
    for function in native_library.library, native.why_not_native:
        function.cache_clear()


def program(file: Path, script: str) -> Path:
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@linux
@pytest.mark.parametrize("kept", [0, 1, 63, 64, 1000, 0.5, 0.99, -1])
def test_a_library_that_is_cut_off_is_built_again_and_standard_error_says_so(cache, kept, capsys):
    assert native.why_not_native() is None
    whole = cache.read_bytes()
    cache.unlink()  # not cut off in place: this process has it loaded
    cache.write_bytes(whole[: kept if isinstance(kept, int) else int(len(whole) * kept)])
    for function in native_library.library, native.why_not_native:
        function.cache_clear()
    assert native.why_not_native() is None
    assert cache.read_bytes() == whole
    assert f"{cache}: it " in capsys.readouterr().err
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


HAVE = """
import os, sys
from fp4dse.kernels import native

def start():
    child = os.fork()
    if not child:
        os.write(2, (native.why_not_native() or 'has it').encode() + b'\\n')  # at once: others write there, too
        os._exit(0)
    return child
"""
"""Of this program each fork asks for the library, and none has to import torch."""


def run(script: str, *words: Path, **environment: str) -> str:
    """Standard error of HAVE and the script."""
    command, more = [sys.executable, "-c", HAVE + script, *map(str, words)], {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=more, timeout=120).stderr


@pytest.mark.heavy
@linux
def test_neither_garbage_nor_another_library_is_taken_for_ours(cache, tmp_path):
    """A process that has loaded another library by that name goes on without; the next one has ours."""
    subprocess.run([tmp_path / "c++", "-o", tmp_path / "ours"], check=True)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(os.urandom(5000))
    again = """
import shutil
cache, *contents, ours = sys.argv[1:]
for content in contents:
    shutil.copyfile(content, cache)
    os.waitpid(start(), 0)
    assert open(cache, "rb").read() == open(ours, "rb").read()
    print("---", file=sys.stderr, flush=True)
os.waitpid(start(), 0)
"""
    *found, last = run(again, cache, garbage, Path(_ctypes.__file__), tmp_path / "ours").split("---\n")
    assert len(found) == 2
    for said in found:
        assert "it is built again" in said
        assert said.endswith("has it\n") or "native code not taken: " in said
    assert last == "has it\n"


def test_a_compiler_that_writes_nonsense_is_passed_over_with_the_reason(cache, monkeypatch, tmp_path):
    script = '[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\necho nonsense > $2'
    monkeypatch.setenv("CXX", str(program(tmp_path / "wrong", script)))
    assert native.why_not_native().startswith("native code not taken: ")


def test_what_a_failed_compiler_leaves_is_not_in_the_cache(tmp_path):
    compiler = program(tmp_path / "c++", "echo half > $2; echo no such header >&2; exit 3")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        compiling.build([str(compiler), "-o", str(tmp_path / "out")])
    assert (failed.value.returncode, failed.value.stderr) == (3, "no such header\n")
    assert [file.name for file in tmp_path.iterdir()] == ["c++"]


SLOW = "echo half > $2\nsleep 600 &\necho $$ $! > $3.new; mv $3.new $3\nwait"
"""A compiler with a child, as they all have, that has written some of its output."""


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_compiler_and_its_children_die_with_the_process_that_asked_for_it(tmp_path, number):
    words = [str(program(tmp_path / "c++", SLOW)), "-o", str(tmp_path / "out"), str(tmp_path / "pids")]
    script = "import runpy, sys; runpy.run_path(sys.argv[1])['build'](sys.argv[2:])"
    with subprocess.Popen([sys.executable, "-c", script, str(COMPILING), *words]) as parent:
        pids = wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text()).split()
        assert all(is_running(int(pid)) for pid in pids)
        parent.send_signal(number)
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids))
    assert not (tmp_path / "out").exists()


@linux
def test_a_time_limit_ends_the_compiler_and_its_children(tmp_path):
    words = [str(program(tmp_path / "c++", SLOW)), "-o", str(tmp_path / "out"), str(tmp_path / "pids")]
    with pytest.raises(subprocess.TimeoutExpired):
        compiling.build(words, timeout=2)
    pids = (tmp_path / "pids").read_text().split()
    wait_for(lambda: not any(is_running(int(pid)) for pid in pids))
    assert not (tmp_path / "out").exists()


@pytest.mark.heavy
def test_processes_that_build_at_once_all_have_the_library(cache, tmp_path):
    copies = program(tmp_path / "slow", f'[ "$1" = --version ] || sleep 1\nexec {tmp_path / "c++"} "$@"')
    together = "for child in [start(), start()]:\n    os.waitpid(child, 0)"
    assert run(together, CXX=str(copies)) == "has it\n" * 2
