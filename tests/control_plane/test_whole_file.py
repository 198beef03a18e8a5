"""A file that others read is written whole, and never in the place of what is no file."""

import os
import stat

import pytest

from control_plane.whole_file import try_whole, write_whole


@pytest.mark.parametrize("before", [None, "old"])
def test_it_has_the_text_and_leaves_nothing_else(tmp_path, before):
    path = tmp_path / "file"
    if before is not None:
        path.write_text(before)
    try_whole(path)
    assert (path.read_text() if path.exists() else None) == before
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_a_symbolic_link_stays_and_its_file_is_written(tmp_path, there):
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    target.parent.mkdir()
    if there:
        target.write_text("old")
    link.symlink_to(target)
    try_whole(link)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("function", [lambda path: write_whole(path, "new"), try_whole])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path, function):
    folder, pipe, link = (tmp_path / name for name in ("folder", "pipe", "link"))
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (folder, pipe, link):
        with pytest.raises(OSError, match=f"it is no regular file: '{path}'"):
            function(path)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [folder, link, pipe]


@pytest.mark.parametrize("function", [lambda path: write_whole(path, "new"), try_whole])
def test_what_a_killed_process_of_this_number_left_is_no_obstacle(tmp_path, function):
    path = tmp_path / "file"
    (tmp_path / f".file.{os.getpid()}").write_text("hal")
    function(path)
    assert list(tmp_path.iterdir()) == ([path] if path.exists() else [])


@pytest.mark.parametrize("function", [lambda path: write_whole(path, "new"), try_whole])
def test_an_error_names_the_path_that_was_given(tmp_path, function):
    path = tmp_path / "none" / "file"
    with pytest.raises(FileNotFoundError, match=f"'{path}'"):
        function(path)
