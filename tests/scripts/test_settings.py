"""One table of settings: the same options, words and ranges wherever they can be given."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from control_plane.__main__ import command as control_plane
from control_plane.config import ControlPlaneConfig, SchedulingConfig
from control_plane.settings import SETTINGS, config_of
from scripts.cli.main import main
from scripts.cli.serve import invitation, read_model, serve, settings_lines, settings_of
from scripts.launcher import Addresses
from scripts.settings import ServeSettings, control_plane_command

ROOT = Path(__file__).parents[2]
OWN_OF_CONTROL_PLANE = {"--model", "--groups", "--chips", "--exit-with-parent"}


@pytest.fixture
def quiet(monkeypatch) -> None:
    """The control plane's command leaves the logging of the test's process as it is."""
    monkeypatch.setattr("control_plane.__main__.configure_logging", lambda _: None)


def options_of(command: click.Command) -> dict[str, click.Option]:
    return {
        option.opts[0]: option
        for option in command.params
        if isinstance(option, click.Option) and option.name != "help"
    }


def settings(*options: str) -> ServeSettings:
    values = dict(serve.make_context("serve", list(options)).params)
    del values["announce"]
    return settings_of(values)


def received(chosen: ServeSettings) -> ControlPlaneConfig:
    """What the control plane makes of the arguments it is started with."""
    arguments = control_plane_command(chosen, "/announce")[3:]
    values = control_plane.make_context("control-plane", arguments).params
    fields = {setting.field for setting in SETTINGS}
    given = {name: value for name, value in values.items() if name in fields}
    return config_of(given | {"model_path": values["model_path"]})


def table_of_docs() -> dict[str, list[str]]:
    """Option to default and meaning, from the tables of docs/settings.md."""
    rows = {}
    for line in (ROOT / "docs" / "settings.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`--"):
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def test_the_docs_list_every_option_with_its_default_and_meaning() -> None:
    table = table_of_docs()
    options = options_of(serve)
    assert list(table) == list(options)
    for name, option in options.items():
        default = option.show_default if isinstance(option.show_default, str) else option.default
        if option.is_flag:
            default = "off"
        elif not isinstance(default, str | int | float) or default == "":
            default = "none"
        assert table[name] == [str(default), option.help], name


def test_both_commands_take_the_whole_table_in_the_same_words() -> None:
    flags = {setting.flag for setting in SETTINGS}
    for_serve, for_control_plane = options_of(serve), options_of(control_plane)
    assert flags <= set(for_serve)
    shared = set(for_control_plane) - OWN_OF_CONTROL_PLANE
    assert shared - flags == {"--join-token-file", "--api-key-file", "--announce", "--log-level"}
    for flag in shared - {"--log-level"}:
        assert for_serve[flag].help == for_control_plane[flag].help, flag


def test_every_field_of_the_configuration_has_an_option() -> None:
    fields = {*ControlPlaneConfig.__dataclass_fields__, *SchedulingConfig.__dataclass_fields__}
    elsewhere = {"model_path", "group_sizes", "join_token", "api_keys", "announce_path"}
    assert fields - elsewhere - {"scheduling"} == {setting.field for setting in SETTINGS}


def test_the_control_plane_receives_what_serve_was_told() -> None:
    for chosen in (
        settings(),
        settings(
            *("--policy", "priority", "--prefix-cache", "off", "--debug-api", "--context", "99"),
            *("--max-top-logprobs", "0", "--ageing", "1.5", "--max-queue", "7", "--http-port", "0"),
            *("--kv-policy", "shard", "--model-name", "m", "--intake-bytes", "12345"),
        ),
    ):
        sent = chosen.control_plane
        assert received(chosen) == config_of(
            {setting.field: setting.of(sent) for setting in SETTINGS}
            | {"model_path": sent.model_path}
        )
    assert (sent.scheduling.policy, sent.scheduling.prefix_cache) == ("priority", False)
    assert (sent.top_logprobs_max, sent.scheduling.context_tokens) == (0, 99)


BOUNDED = [setting for setting in SETTINGS if setting.range is not None or setting.choices]


@pytest.mark.parametrize("setting", BOUNDED, ids=lambda setting: setting.flag)
def test_a_value_outside_its_range_is_refused_by_name(setting) -> None:
    if setting.range is None:
        values = ["luck"]
    else:
        values = [str(bound) for bound in (setting.range.least - 1, setting.range.most + 1)]
    for value in values:
        result = CliRunner().invoke(main, ["serve", f"{setting.flag}={value}"])
        assert result.exit_code == 2, value
        assert setting.flag in result.output or "finite" in result.output


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_seconds_are_a_number(value) -> None:
    result = CliRunner().invoke(main, ["serve", "--drain-deadline", value])
    assert result.exit_code == 2
    assert re.search(rf"drain.deadline.* {value}", result.output)


def test_the_files_of_keys_reach_the_control_plane(tmp_path) -> None:
    keys, token = tmp_path / "keys", tmp_path / "token"
    keys.write_text("# of the team\nsk-one\n\nsk-two\n")
    token.write_text("secret\n")
    chosen = settings("--api-key-file", str(keys), "--join-token-file", str(token))
    command = control_plane_command(chosen, "/announce")
    assert command[command.index("--api-key-file") + 1] == str(keys)
    assert command[command.index("--join-token-file") + 1] == str(token)
    text = "\n".join(settings_lines(chosen))
    assert f"{keys} (keys: 2)" in text
    assert "sk-" not in text
    assert "secret" not in text


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        ("", "holds no key"),
        ("# none yet\n\n", "holds no key"),
        ("sk-one\nsk two\n", "line 2"),
        ("schlüssel\n", "line 1"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(tmp_path, content, said) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    for command in ([main, "serve"], [control_plane, "--model", "/no/model"]):
        entry, *arguments = command
        result = CliRunner().invoke(entry, [*arguments, "--api-key-file", str(path)])
        assert result.exit_code in (1, 2)
        assert said in result.output
        assert str(path) in result.output.replace("\n", "")
        assert "sk-one" not in result.output


@pytest.mark.usefixtures("quiet")
def test_an_empty_join_token_is_refused(tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text("\n")
    result = CliRunner().invoke(control_plane, ["--model", "m", "--join-token-file", str(path)])
    assert result.exit_code == 1
    assert "is empty" in result.output


def test_the_invitation_tells_where_the_key_goes() -> None:
    addresses = Addresses(8000, 50051, 1)
    with_key = "\n".join(invitation("127.0.0.1", addresses, Path("/etc/keys")))
    assert '-H "Authorization: Bearer $POLYCHIP_API_KEY"' in with_key
    assert "export POLYCHIP_API_KEY=...  # from /etc/keys" in with_key
    assert "KEY" not in "\n".join(invitation("127.0.0.1", addresses))


def test_a_context_beyond_the_models_is_shown_as_the_models() -> None:
    def lines(context: str) -> str:
        chosen = settings("--context", context)
        return "\n".join(settings_lines(chosen, context_max=read_model(chosen).context_tokens))

    assert "8192 (all the model allows; 1000000 asked for)" in lines("1000000")
    assert " 4000\n" in lines("4000")
