"""Files that commands write: whole or not at all, and the error names what a user can change."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.bench_records import answered, report_of
from tests.support.full_disk import full_disk
from trtserve.bench.exports import write_result
from trtserve.errors import DiskSpaceError, TrtserveError, UsageError
from trtserve.files import make_folder, replacing, write_json, write_whole

OLD, NEW = "old", "new" * 50_000


@pytest.mark.parametrize("write", [write_whole, write_json], ids=["text", "json"])
def test_a_full_disk_leaves_the_older_file_and_nothing_hidden(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(OLD)
    with full_disk(), pytest.raises(DiskSpaceError, match="file cannot be written"):
        write(path, NEW)
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == (OLD, ["file"])
    write(path, NEW)
    assert NEW in path.read_text()


def test_a_full_disk_leaves_the_older_result_of_a_benchmark_whole(tmp_path: Path) -> None:
    write_result(report_of([answered(0, intended=0.0)]), tmp_path)
    older = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    many = report_of([answered(number, intended=number / 10) for number in range(100)])
    with full_disk(room=20_000), pytest.raises(DiskSpaceError):  # some of the files fit
        write_result(many, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == older


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("missing/below/a.yaml", "the folder {}/missing/below does not exist"),
        ("file/a.yaml", "{}/file is not a folder"),
        ("file/below/a.yaml", "{}/file is not a folder"),
        ("folder", "it is a folder"),
        ("dangling", "the folder {}/gone does not exist"),
    ],
)
def test_a_place_where_no_file_can_be_is_named(place: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "full").mkdir(parents=True)
    (tmp_path / "dangling").symlink_to("gone/a.yaml")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as caught:
        write_whole(tmp_path / place, NEW)
    assert caught.value.message == f"{tmp_path / place} cannot be written: {reason.format(tmp_path)}."
    assert "permissions" not in str(caught.value.hint)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_where_a_folder_is_wanted_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file cannot be written: it is a file, not a folder"):
        make_folder(tmp_path / "file")
    with pytest.raises(UsageError, match="file is not a folder"):
        make_folder(tmp_path / "file" / "below")


def test_the_target_of_a_link_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == NEW


def test_two_that_write_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(letter: str) -> set[str]:
        seen = set()
        for _ in range(100):
            write_whole(path, letter * 100_000)
            seen.add(path.read_text())
        return seen

    with ThreadPoolExecutor() as pool:
        seen = set[str]().union(*pool.map(write, "abcd"))
    assert seen <= {letter * 100_000 for letter in "abcd"}
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_an_error_in_the_block_is_kept(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as staged:
            staged.write_text(NEW)
            raise TrtserveError("mine")

    with pytest.raises(TrtserveError, match="mine"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text", mode=0o755)
        assert os.read(reading, 16) == b"text"
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [pipe]
