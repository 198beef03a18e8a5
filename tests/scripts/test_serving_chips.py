"""Which chips serve: groups of several makes, lists of devices, options of backends, the table."""

import os
from typing import Any

import pytest
from click.testing import CliRunner
from typing_extensions import override

from backends import plugin
from backends.errors import BackendUnavailable
from backends.plugin import Backend, BackendConfig, ChipDescription
from scripts.cli.main import main
from scripts.cli.serve import serve, settings_lines, settings_of
from scripts.cli.serving_chips import chip_table, look_at_chips, settle_backends
from scripts.launcher import Launcher
from scripts.settings import ServeSettings, worker_command

HOST = ("--backend-option", "device-ids=0,1,2,3,4,5,left,right")
"""A host with eight chips of these ids."""
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--worker-port", "0")


def settings(*options: str) -> ServeSettings:
    values = dict(serve.make_context("serve", list(options)).params)
    del values["announce"]
    return settings_of(values)


def places(chosen: ServeSettings) -> list[tuple[int, int, str, int]]:
    return [
        (each.index, each.group, each.backend, each.local_index) for each in chosen.chip_places()
    ]


def given(chosen: ServeSettings, chip: int, *options: str) -> list[str | None]:
    """What the worker of a chip is told by each of the options; None where it is not."""
    command = worker_command(chosen, chip, "0")
    return [command[command.index(each) + 1] if each in command else None for each in options]


def table(*options: str) -> list[list[str]]:
    chosen = settings(*options)
    return [line.split() for line in chip_table(chosen, look_at_chips(chosen))]


def refusal(*options: str) -> str:
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split("Error:", 1)[1].split())


# ---------------------------------------------------------------- groups


def test_each_group_may_name_its_backend() -> None:
    chosen = settings("--groups", "cpu:2,sim:ideal:1,2,cpu:1", "--backend", "sim:ideal")
    assert chosen.group_sizes == (2, 1, 2, 1)
    assert chosen.backends == ("cpu", "sim:ideal")
    assert places(chosen) == [
        (0, 0, "cpu", 0),
        (1, 0, "cpu", 1),
        (2, 1, "sim:ideal", 0),
        (3, 2, "sim:ideal", 1),
        (4, 2, "sim:ideal", 2),
        (5, 3, "cpu", 2),
    ]
    told = [given(chosen, chip, "--backend", "--chip", "--chips-on-host") for chip in (1, 4, 5)]
    assert told == [["cpu", "1", "3"], ["sim:ideal", "2", "3"], ["cpu", "2", "3"]]


@pytest.mark.parametrize("groups", ["cpu:", "cpu:x", ":2:", "sim:ideal", "2,,1", "cpu:0"])
def test_a_group_that_cannot_be_read_is_refused(groups: str) -> None:
    assert "is not a group" in refusal("--groups", groups)


def test_the_settings_show_what_was_asked_for() -> None:
    options = ("--groups", "cpu:1,sim:2", "--devices", "cpu=left;sim=3,5", *HOST)
    text = "\n".join(settings_lines(settings(*options)))
    for shown in ("cpu:1,sim:2", "cpu=left;sim=3,5", "sim.device-ids=0,1"):
        assert shown in text
    text = "\n".join(settings_lines(settings("--groups", "2,1", "--devices", "5,1,0")))
    for shown in (" 2,1\n", " 5,1,0\n"):
        assert shown in text


# ---------------------------------------------------------------- devices


@pytest.mark.parametrize("ids", ["0,1,2,5", "5,1", "left,0,right"])
def test_the_place_in_the_list_is_the_local_index(ids: str) -> None:
    chosen = settings("--devices", ids, *HOST)
    listed = ids.split(",")
    assert chosen.group_sizes == (1,) * len(listed)
    for position, device_id in enumerate(listed):
        row = table("--devices", ids, *HOST)[1 + position]
        assert row[:5] == [f"chip{position}", f"g{position}", "cpu", str(position), device_id]
        assert given(chosen, position, "--chip", "--devices") == [str(position), ids]


def test_without_a_list_the_first_chips_are_taken() -> None:
    rows = table("--chips", "2", *HOST)
    assert [row[3:5] for row in rows[1:]] == [["0", "0"], ["1", "1"]]
    assert given(settings("--chips", "2"), 1, "--devices") == [None]


def test_each_make_has_its_own_list_and_options() -> None:
    chosen = settings(
        *("--groups", "cpu:1,sim:ideal:2", "--devices", "sim=3,5;cpu=left"),
        *("--backend-option", "cpu.device-ids=left", "--backend-option", "sim.seed=3"),
        *("--backend-option", "communicator-host=::1"),
    )
    cpu, sim = worker_command(chosen, 0, "0"), worker_command(chosen, 2, "0")
    assert given(chosen, 0, "--devices", "--chip") == ["left", "0"]
    assert given(chosen, 2, "--devices", "--chip") == ["3,5", "1"]
    assert "device-ids=left" in cpu
    assert "seed=3" in sim
    assert "seed=3" not in cpu
    assert "communicator-host=::1" in cpu
    assert "communicator-host=::1" in sim


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--devices", "0,7", *HOST),
            "no device '7'; devices of cpu: 0, 1, 2, 3, 4, 5, left, right",
        ),
        (("--devices", "0,1,0"), "device '0' is listed twice"),
        (("--devices", "0,,1"), "has an empty id"),
        (("--devices", ""), "has an empty id"),
        (("--devices", "0,1", "--chips", "3"), "2 ids for 3 chips of 'cpu'"),
        (("--devices", "0,1,2", "--groups", "2,2"), "3 ids for 4 chips of 'cpu'"),
        (("--devices", "tpu=0", "--chips", "1"), "no group is of backend 'tpu'"),
        (("--devices", "=0"), "no backend stands before ="),
        (("--devices", "cpu=0;cpu=1"), "given twice"),
        (("--devices", "0", "--groups", "cpu:1,sim:1"), "each list needs its backend"),
        (("--devices", "0;sim=1", "--groups", "cpu:1,sim:1"), "each list needs its backend"),
        (("--devices", "sim=0", "--groups", "sim:ideal:1,sim:p800_shim:1"), "name its variant"),
    ],
    ids=str,
)
def test_a_list_that_does_not_fit_is_refused_by_name(options: tuple[str, ...], said: str) -> None:
    assert said in refusal(*options)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("seed", "'seed' is neither NAME=VALUE nor"),
        ("=3", "'=3' is neither"),
        ("tpu.seed=3", "no group is of backend 'tpu'"),
    ],
)
def test_an_option_that_cannot_be_read_is_refused(option: str, said: str) -> None:
    assert said in refusal("--backend-option", option)


# ---------------------------------------------------------------- backends


class AbacusBackend(Backend):
    auto_rank = 1

    def device_type(self) -> str:
        return "abacus"

    @override
    def enumerate_chips(self, config: BackendConfig) -> list[ChipDescription]:
        return [ChipDescription(index, "beads", device_id=f"bead-{index}") for index in range(2)]

    @override
    def on_init(self, config: BackendConfig) -> None:
        os.environ["ABACUS_ROWS"] = "7"
        if config.options.get("broken"):
            raise BackendUnavailable("a bead is missing: put it back")


class BrokenBackend(AbacusBackend):
    auto_rank = 0

    @override
    def on_init(self, config: BackendConfig) -> None:
        raise BackendUnavailable("the frame is bent")


@pytest.fixture
def abacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two backends that `auto` prefers to those of this machine, the first of them broken."""
    classes = {"abacus": AbacusBackend, "bent": BrokenBackend}
    load = plugin.load_object
    for name in classes:
        monkeypatch.setitem(plugin.BUILT_IN, name, name)
    monkeypatch.setattr(plugin, "load_object", lambda path: classes.get(path) or load(path))


@pytest.mark.usefixtures("abacus")
def test_auto_is_chosen_once_and_says_what_was_tried() -> None:
    chosen, lines = settle_backends(
        settings("--backend", "auto", "--devices", "bead-1,bead-0", "--backend-option", "a=b")
    )
    assert chosen.backends == ("abacus",)
    assert lines == [
        "backend bent was not taken: the frame is bent",
        "backend abacus was taken",
    ]
    assert given(chosen, 0, "--backend", "--devices") == ["abacus", "bead-1,bead-0"]
    assert "a=b" in worker_command(chosen, 1, "0")
    assert [chip.device_id for chip in look_at_chips(chosen)["abacus"]] == ["bead-1", "bead-0"]


@pytest.mark.usefixtures("abacus")
def test_a_named_backend_settles_nothing_and_is_refused_with_its_own_error() -> None:
    chosen = settings("--backend", "abacus")
    assert settle_backends(chosen) == (chosen, [])
    assert "--backend bent: the frame is bent" in refusal("--backend", "bent")
    said = refusal("--groups", "cpu:1,abacus:1", "--backend-option", "abacus.broken=yes")
    assert said == "--backend abacus: a bead is missing: put it back"
    assert "no variant 'big'; it has none" in refusal("--backend", "abacus:big")


@pytest.mark.usefixtures("abacus")
def test_what_a_backend_does_to_the_environment_stays_with_its_workers() -> None:
    look_at_chips(settings("--backend", "abacus"))
    assert "ABACUS_ROWS" not in os.environ


@pytest.mark.usefixtures("abacus")
def test_the_environment_names_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYCHIP_BACKEND", "abacus")
    assert settings().backends == ("abacus",)
    assert settings("--backend", "cpu").backends == ("cpu",)


def test_an_error_that_is_no_backend_error_comes_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> Any:
        raise ZeroDivisionError("in the vendor's library")

    monkeypatch.setitem(plugin.BUILT_IN, "rough", "rough")
    monkeypatch.setattr(plugin, "load_object", fail)
    with pytest.raises(ZeroDivisionError, match="in the vendor's library"):
        look_at_chips(settings("--backend", "rough"))


def test_chips_that_share_cores_are_a_warning_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(_: Launcher) -> int:
        return 0

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(Launcher, "run", run)
    told = [
        CliRunner().invoke(main, ["serve", *FREE_PORTS, *options]).stderr
        for options in (["--chips", "2"], ["--groups", "2,1"])
    ]
    assert told == [
        "",
        "Warning: --backend cpu: 3 chips have 2 cores: some share one and wait for each other; "
        "ask for 2 at most with --chips or --groups\n",
    ]


@pytest.mark.usefixtures("abacus")
def test_more_chips_than_there_are_stand_in_the_table() -> None:
    """Whether their groups form without them is decided when their workers have said so."""
    rows = table("--groups", "abacus:3")
    assert [row[4] for row in rows[1:]] == ["bead-0", "bead-1", "-"]
    assert "not there: 2 chips were found" in " ".join(rows[3])


def test_more_chips_than_cores_can_bear_are_refused_unless_an_option_allows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert refusal("--chips", "17") == (
        "--backend cpu: 17 chips have 2 cores, which is above the limit of 16; ask for 2 at most "
        "with --chips or --groups, or allow more with --backend-option chips-per-core=9"
    )
    told: list[str] = []
    allowed = settings("--chips", "17", "--backend-option", "chips-per-core=9")
    assert len(look_at_chips(allowed, told.append)["cpu"]) == 17
    assert len(told) == 1
    assert "give a number from 1 on" in refusal("--backend-option", "chips-per-core=0")
    assert "range 1<=x<=4096" in refusal("--chips", "5000000000")
    assert "from 1 to 4096" in refusal("--groups", "5000000000")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--groups", "1,12"), "12 chips cannot share 9 query heads (kv policy 'cover'); use 1 to"),
        (("--groups", "4", "--kv-policy", "shard"), "a group of 4 chips cannot share 3 key/value"),
    ],
)
def test_a_group_that_cannot_share_the_model_is_refused_before_anything_starts(
    options: tuple[str, ...], said: str
) -> None:
    pytest.importorskip("torch", reason="the rules need torch")
    told = refusal(*options)
    assert told.startswith("--groups: a group of")
    assert said in told
