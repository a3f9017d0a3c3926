"""Files that are written whole: what a writer that died leaves, and what another must not touch."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stretto import files
from stretto.files import write_atomically

SLOW = """
import sys
from pathlib import Path
from stretto import files

def held(number):
    print("written, and not yet in its place", flush=True)
    sys.stdin.readline()

files.os.fsync = held
files.write_atomically(Path(sys.argv[1]), b"theirs")
"""


@contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is in the middle of writing `path`, until it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_writer_left_is_taken_away_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40 + ".json")
    with writing(path) as process:
        process.kill()
        process.wait()
    assert [name[-4:] for name in names(tmp_path)] == [".tmp"]
    write_atomically(path, b"ours")
    assert names(tmp_path) == [path.name]


def test_what_a_living_writer_has_begun_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with writing(path) as process:
        write_atomically(path, b"ours")
        assert path.read_bytes() == b"ours"
        assert len(names(tmp_path)) == 2
        process.communicate("\n")
        assert process.returncode == 0
    assert path.read_bytes() == b"theirs"
    assert names(tmp_path) == ["a.json"]


def test_only_scratch_files_of_the_same_name_are_taken_away(tmp_path: Path) -> None:
    others = {
        ".b.json.0123abcd.tmp", ".a.json.0123abcd.tmp.bak", ".a.json.tmp", "a.json.0123abcd.tmp",
        ".a.json.0123abcd.89ef4567.tmp", ".a.json.notahash.tmp", ".axjson.0123abcd.tmp",
    }  # fmt: skip
    for name in (*others, ".a.json.0123abcd.tmp"):
        (tmp_path / name).touch()
    (tmp_path / ".a.json.ffffffff.tmp").mkdir()
    write_atomically(tmp_path / "a.json", b"ours")
    assert names(tmp_path) == sorted({*others, "a.json", ".a.json.ffffffff.tmp"})


def test_what_cannot_be_taken_away_keeps_nobody_from_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".a.json.0123abcd.tmp"
    left.touch()

    def refuse(*_: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_atomically(tmp_path / "a.json", b"ours")
    assert names(tmp_path) == [left.name, "a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"ours"


def test_a_writer_whose_file_was_swept_before_it_was_locked_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, []

    def late(file: Any, how: int) -> None:
        if not swept:
            swept.extend(path.unlink() for path in tmp_path.glob(".*.tmp"))
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    write_atomically(tmp_path / "a.json", b"ours")
    assert swept == [None]
    assert names(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"ours"


def test_writers_of_one_file_do_not_disturb_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "fsync", lambda number: None)
    path, texts = tmp_path / "a.json", [str(n).encode() * 1000 for n in range(200)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(path, text), texts))
    assert path.read_bytes() in texts
    assert names(tmp_path) == ["a.json"]
