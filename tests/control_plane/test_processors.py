"""Cores are counted without their hyperthreads, and half of them tokenize."""

import pytest

from control_plane import processors
from control_plane.processors import physical_cores_count, tokenizer_threads_default


def test_two_threads_of_a_core_count_once(tmp_path):
    for processor, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    (tmp_path / "cpufreq").mkdir()
    assert physical_cores_count(tmp_path) == 2


def test_where_the_machine_does_not_tell_there_is_one_at_least(tmp_path):
    assert physical_cores_count(tmp_path) >= 1
    assert physical_cores_count() >= 1


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 1), (8, 4)])
def test_half_the_cores_tokenize(monkeypatch, cores, threads):
    monkeypatch.setattr(processors, "physical_cores_count", lambda: cores)
    assert tokenizer_threads_default() == threads
