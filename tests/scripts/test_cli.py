"""The command line: settings from options, refusals, exit statuses; commands stay light."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.cli.main import COMMANDS, main
from scripts.cli.serve import invitation, serve, settings_lines, settings_of
from scripts.client import PolychipClient, ServiceRefused
from scripts.generation import Generation, Message, Piece
from scripts.launcher import Addresses
from scripts.progress import progress_lines
from scripts.settings import ServeSettings, control_plane_command, worker_command
from scripts.topology import numa_nodes_count

ROOT = Path(__file__).parents[2]


def settings(*options: str) -> ServeSettings:
    values = dict(serve.make_context("serve", list(options)).params)
    del values["announce"]
    return settings_of(values)


def option_of(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_one_chip_per_numa_node_is_the_default() -> None:
    assert settings().group_sizes == (1,) * numa_nodes_count()


@pytest.mark.parametrize(
    ("lists", "count"), [(["0-3", "4-7"], 2), (["0-3", ""], 1), ([], 1)], ids=str
)
def test_nodes_without_processors_do_not_count(
    tmp_path: Path, lists: list[str], count: int
) -> None:
    for number, cpus in enumerate(lists):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    assert numa_nodes_count(tmp_path) == count


def test_groups_and_blocks_reach_the_processes() -> None:
    chosen = settings("--groups", "2,1", "--kv-blocks", "64,48,32", "--prefix-cache", "off")
    control_plane = control_plane_command(chosen, "/announce")
    assert option_of(control_plane, "--groups") == "2,1"
    assert option_of(control_plane, "--prefix-cache") == "off"
    blocks = [option_of(worker_command(chosen, chip, "0"), "--kv-blocks") for chip in range(3)]
    assert blocks == ["64", "48", "32"]
    same = settings("--chips", "2", "--kv-blocks", "64")
    assert [option_of(worker_command(same, chip, "0"), "--kv-blocks") for chip in (0, 1)] == [
        "64",
        "64",
    ]
    assert "--kv-blocks" not in worker_command(settings(), 0, "0")


def test_how_weights_are_held_reaches_every_worker() -> None:
    assert option_of(worker_command(settings(), 0, "0"), "--weights") == "auto"
    chosen = settings("--weights", "native", "--groups", "2,1")
    assert {option_of(worker_command(chosen, chip, "0"), "--weights") for chip in range(3)} == {
        "native"
    }


@pytest.mark.parametrize(
    ("where", "arguments"),
    [
        ("scripts.cli.main.importlib.import_module", ["plan"]),
        ("scripts.cli.calibrate.settle_backends", ["calibrate"]),
        ("scripts.cli.bench_compare.look_at", ["bench", "compare"]),
        ("scripts.cli.bench_step.find_backend", ["bench", "step"]),
    ],
)
def test_ctrl_c_is_status_130_however_early_it_comes(
    where: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--chips", "2", "--groups", "2"], "--chips and --groups"),
        (["--chips", "1", "--kv-blocks", "64,48"], "--kv-blocks has 2 numbers for 1 chips"),
        (["--groups", "2,x"], "'x' is not a group"),
        (["--groups", "0"], "'0'"),
        (["--backend", "unheard-of"], "unheard-of"),
        (["--model", "/no/such/model"], "/no/such/model"),
        (["--model", "tests"], "tests/config.json: No such file"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1: "),
        (["--http-port", "8100", "--grpc-port", "8100"], "--http-port and --grpc-port are the"),
        (["--max-running", "0"], "--max-running"),
        (["--block-tokens", "8193"], "block_tokens is 8193, but the model has a context of 8192"),
        (["--kv-blocks", "64,16777217"], "from 1 to 16777216"),
        (["--digest-interval", "0"], "--digest-interval"),
        (["--ageing", "-1"], "--ageing"),
        (["--oldest-prefill-share", "2"], "--oldest-prefill-share"),
        (["--heartbeat-timeout", "0.1"], "heartbeat timeout 0.1 s"),
        (["--announce", os.devnull], f"'{os.devnull}' cannot be written: it is no regular file"),
        (["--announce", "none/file"], "is no file in a folder that exists"),
        (["--announce", "x" * 300], "cannot be written: File name too long"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_as_usage(options: list[str], named: str) -> None:
    result = CliRunner().invoke(main, ["serve", *options])
    assert result.exit_code == 2
    assert named in result.output
    assert result.stdout == "", "it comes before the settings"


def test_every_setting_is_shown_at_start() -> None:
    text = "\n".join(settings_lines(settings("--kv-blocks", "64")))
    hidden = {"chips", "announce", "help"}
    for option in serve.params:
        if option.name not in hidden:
            assert f"  {option.opts[0].removeprefix('--')} " in text
    assert "kv-blocks " in text
    assert " 64" in text


def test_the_invitation_names_ports_that_differ() -> None:
    text = "\n".join(invitation("0.0.0.0", Addresses(8123, 50123, 1)))
    assert "http://127.0.0.1:8123/v1/chat/completions" in text
    assert "--grpc-port 50123" in text
    assert "--grpc-port" not in "\n".join(invitation("127.0.0.1", Addresses(8000, 50051, 1)))


@pytest.mark.parametrize(
    "command", [["chat", "hello"], ["status", "--json"], ["cache", "flush"]], ids=str
)
def test_an_unreachable_service_is_status_3(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--grpc-port", "1", "--http-port", "1"])
    assert result.exit_code == 3
    assert "127.0.0.1:1" in result.output
    assert "polychip serve" in result.output


def a_status(groups_count: int) -> dict[str, object]:
    """A status with numbers as wide as a long run makes them; two chips a group."""
    ranks = [[f"chip{2 * group}", f"chip{2 * group + 1}"] for group in range(groups_count)]
    blocks = {"free": 1234567, "cached": 1234567, "referenced": 1234567, "total": 3703701}
    return {
        "workers": [
            {"id": name, "pid": 4194304, "state": "cordoned", "group": f"g{group}", "device": "cpu"}
            | {"blocks": 3703701}
            for group, names in enumerate(ranks)
            for name in names
        ],
        "groups": [
            {
                "id": f"g{group}",
                "epoch": 100,
                "ranks": names,
                "state": "recovering",
                "blocks": blocks,
            }
            | {"running": 100, "waiting": 1024, "retracted": 100, "block_tokens": 16}
            for group, names in enumerate(ranks)
        ],
        "frontends": [],
        "requests": {"running": 100, "waiting": 1024},
        "generated_tokens": 1 << 40,
        "failovers": 3,
    }


def test_the_status_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PolychipClient, "status", lambda _: a_status(2))
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["status", "--http-port", "1"])
    assert result.exit_code == 0, result.output
    assert "…" not in result.output
    for words in (["Running", "Waiting", "Retracted"], ["g1", "16", "1234567", "1234567"]):
        assert any(set(words) <= set(line.split()) for line in result.output.splitlines()), words
    assert "Failovers: 3" in result.output


def test_progress_is_a_line_of_workers_and_one_a_serving_group() -> None:
    status = a_status(2)
    groups = status["groups"]
    assert isinstance(groups, list)
    groups[1]["state"] = "serving"
    assert progress_lines(status) == [
        "chip0 cordoned, chip1 cordoned, chip2 cordoned, chip3 cordoned",
        "g1 serves on chip2 chip3 with 3703701 blocks of 16 tokens (epoch 100)",
    ]


def test_a_refusal_does_not_end_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Generation] = []

    def answers(
        _: PolychipClient, generation: Generation, on_lost: Callable[[], None]
    ) -> Iterator[Piece]:
        del on_lost
        asked.append(generation)
        if len(asked) == 1:
            raise ServiceRefused("too long", "INVALID_ARGUMENT")
        yield Piece(0, (1,), "fine")

    monkeypatch.setattr(PolychipClient, "model_info", lambda _: {"names": ["m"]})
    monkeypatch.setattr(PolychipClient, "generate", answers)
    result = CliRunner().invoke(main, ["chat"], input="first\nsecond\n")
    assert "Error: too long" in result.output
    assert "fine" in result.output
    assert asked[1].prompt == (Message("user", "second"),)
    assert result.exit_code == 1


def test_every_command_has_help() -> None:
    for name in COMMANDS:
        if name not in ("control-plane", "worker"):
            assert CliRunner().invoke(main, [name, "--help"]).exit_code == 0


def test_chat_needs_neither_torch_nor_the_control_plane_but_for_what_a_key_is() -> None:
    code = (
        "import sys, json, scripts.cli.main as cli\n"
        "cli.main.get_command(None, 'chat')\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    assert not loaded & {"torch", "chip_worker", "tokenizers", "starlette", "structlog"}
    assert {name for name in loaded if name.startswith("control_plane.")} == {
        "control_plane.errors",
        "control_plane.intake",
        "control_plane.intake.api_keys",
    }
