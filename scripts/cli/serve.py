"""`polychip serve`: the whole service on this machine, from one command."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import anyio
import click

from control_plane.errors import ConfigurationError
from control_plane.intake.model_files import ModelFiles, load_intake_model
from control_plane.ports import check_ports
from control_plane.processors import tokenizer_threads_default
from control_plane.settings import SETTINGS, config_of, read_api_keys, read_join_token
from scripts.cli.chip_options import (
    ChipGroup,
    device_lists,
    devices_by_backend,
    options_by_backend,
)
from scripts.cli.serve_options import serve_options
from scripts.cli.serving_chips import check_groups, chip_table, look_at_chips, settle_backends
from scripts.cli.settings_file import names_from_file, warnings_of
from scripts.launcher import Addresses, Launcher
from scripts.settings import ServeSettings, dialled
from scripts.topology import numa_nodes_count

QUESTION = "What is the capital of France?"
BEGINNING = "The capital of France is"


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@serve_options
def serve(announce: Path | None, **values: object) -> None:
    """Serves a model on this machine until SIGTERM or Ctrl-C.

    Prints the settings, then what to type once the model answers. A first SIGTERM or Ctrl-C lets
    running requests finish; a second one ends at once.
    """
    started = time.monotonic()
    settings = settings_of(values)
    model = read_model(settings)
    settings, tried = settle_backends(settings)
    warnings: list[str] = []
    chips = look_at_chips(settings, warnings.append)
    check_groups(settings)
    try:
        check_ports(settings.control_plane)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    from_file = names_from_file(click.get_current_context())
    click.echo(f"Polychip {version('polychip')}")
    for line in (
        *tried,
        *settings_lines(settings, from_file, context_max=model.context_tokens),
        "",
        *chip_table(settings, chips),
        "",
    ):
        click.echo(line)
    for warning in (*warnings, *warnings_of(settings)):
        click.echo(f"Warning: {warning}", err=True)

    def report(line: str) -> None:
        click.echo(f"{time.monotonic() - started:6.1f} s  {line}")

    def on_ready(addresses: Addresses) -> None:
        report(f"ready: /health answers 200 after {time.monotonic() - started:.1f} s")
        chats = model.chat_template is not None
        for line in invitation(settings.host, addresses, settings.api_key_file, chats=chats):
            click.echo(line)

    launcher = Launcher(settings, report=report, on_ready=on_ready, announce_path=announce)
    sys.exit(anyio.run(launcher.run))


def settings_of(values: dict[str, object]) -> ServeSettings:
    """Settings from the command's options, with the defaults that depend on this machine.

    Raises UsageError naming the options that do not fit together.
    """
    values = dict(values)
    values |= _chip_values(
        values.pop("chips"),
        values.pop("groups"),
        values.pop("devices"),
        values.pop("backend_options"),
        str(values["backend"]),
    )
    values["kv_blocks"] = values["kv_blocks"] or ()
    values["model_path"] = str(values["model_path"])
    values["tokenizer_threads"] = values["tokenizer_threads"] or tokenizer_threads_default()
    own = {
        each.name: values.pop(each.name) for each in fields(ServeSettings) if each.name in values
    }
    try:
        settings = ServeSettings(control_plane=config_of(values), **own)  # type: ignore[arg-type]
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    if len(settings.kv_blocks) not in (0, 1, settings.chips_count):
        raise click.UsageError(
            f"--kv-blocks has {len(settings.kv_blocks)} numbers for {settings.chips_count} chips; "
            "give one for all, or one per chip"
        )
    return settings


def read_model(settings: ServeSettings) -> ModelFiles:
    """What clients see of the model.

    Raises UsageError if there is none to be read, or the settings do not fit it.
    """
    try:
        return load_intake_model(settings.control_plane)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


def _chip_values(
    chips: object, groups: object, devices: object, options: object, backend: str
) -> dict[str, object]:
    """What the options about chips come to; a list of devices says how many, if nothing else does.

    As click has them: a number, ChipGroups, a text (None: not given), and texts.
    """
    if chips is not None and groups is not None:
        raise click.UsageError(
            "--chips and --groups exclude each other: --chips N is N groups of 1"
        )
    assert groups is None or isinstance(groups, tuple)
    assert isinstance(options, tuple)
    lists = {} if devices is None else device_lists(str(devices))
    if groups is None and chips is None and lists:
        groups = tuple(ChipGroup(1, name or None) for name, ids in lists.items() for _ in ids)
    elif groups is None:
        assert chips is None or isinstance(chips, int)
        groups = (ChipGroup(1),) * (chips or numa_nodes_count())
    counts: dict[str, int] = {}
    for group in groups:
        name = group.backend or backend
        counts[name] = counts.get(name, 0) + group.size
    return {
        "group_sizes": tuple(group.size for group in groups),
        "group_backends": tuple(group.backend or backend for group in groups),
        "devices": devices_by_backend(lists, counts),
        "backend_options": options_by_backend(options, list(counts)),
    }


def settings_lines(
    settings: ServeSettings, from_file: Collection[str] = (), *, context_max: int | None = None
) -> list[str]:
    """Every setting under the name of its option, one a line.

    from_file: fields whose values come from the settings file. context_max: tokens that the model
    allows, where it was read.

    Raises UsageError if a file that a setting names cannot be used.
    """
    config = settings.control_plane
    table = {setting.field: setting for setting in SETTINGS}
    chips = _chip_texts(settings)
    shown: dict[str, str] = {}
    for option in serve.params:
        name = option.name or ""
        value: object
        if name in chips:
            value = chips[name]
        elif name in table:
            value = table[name].of(config)
        elif name == "model_path":
            value = config.model_path
        elif hasattr(settings, name):
            value = getattr(settings, name)
        else:
            continue
        origin = f" (from {settings.settings_file})" if name in from_file else ""
        shown[option.opts[0].removeprefix("--")] = _text(value) + origin
    asked = config.scheduling.context_tokens
    if asked is not None and context_max is not None and asked > context_max:
        shown["context"] = f"{context_max} (all the model allows; {asked} asked for)"
    try:
        shown |= _texts_from_files(settings)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    width = max(len(name) for name in shown)
    return [f"  {name:<{width}}  {text}" for name, text in shown.items()]


def _chip_texts(settings: ServeSettings) -> dict[str, str]:
    """What concerns chips and backends as it may be typed, by the options' names."""
    one = settings.backends == (settings.backend,)
    groups = zip(settings.backend_of_group, settings.group_sizes, strict=True)
    devices = settings.devices.items()
    options = settings.backend_options.items()
    return {
        "groups": ",".join(f"{size}" if one else f"{name}:{size}" for name, size in groups),
        "devices": ";".join(f"{'' if one else name + '='}{','.join(ids)}" for name, ids in devices)
        or "all",
        "backend_options": " ".join(
            f"{'' if one else name + '.'}{text}" for name, texts in options for text in texts
        )
        or "none",
        "debug_backend": settings.debug_backend or "none",
    }


def _texts_from_files(settings: ServeSettings) -> dict[str, str]:
    """The settings of which only a file tells what they come to; no secret is shown."""
    texts = {"join-token-file": "none", "api-key-file": "none"}
    texts["settings"] = str(settings.settings_file or "none")
    if settings.join_token_file is not None:
        read_join_token(settings.join_token_file)
        texts["join-token-file"] = str(settings.join_token_file)
    if settings.api_key_file is not None:
        count = len(read_api_keys(settings.api_key_file))
        texts["api-key-file"] = f"{settings.api_key_file} (keys: {count})"
    return texts


def invitation(
    host: str, addresses: Addresses, api_key_file: Path | None = None, *, chats: bool = True
) -> list[str]:
    """What to type next, ready to be pasted; a key is put into the environment first.

    chats: False for a model without a chat template, which can only go on with a text.
    """
    shown_host = dialled(host)
    keys = (
        [] if api_key_file is None else [f"export POLYCHIP_API_KEY=...  # from {api_key_file}", ""]
    )
    bearer = '-H "Authorization: Bearer $POLYCHIP_API_KEY" ' if keys else ""

    def curl(path: str, **body: object) -> str:
        body = {"model": "default", **body, "temperature": 0, "max_tokens": 64}
        return (
            f"curl -s http://{shown_host}:{addresses.http_port}{path} {bearer}"
            f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
        )

    if not chats:
        return [
            "",
            "Let the model go on with a text over HTTP (it has no chat template):",
            "",
            *keys,
            curl("/v1/completions", prompt=BEGINNING),
            "",
        ]
    chat = [_command_name(), "chat", QUESTION]
    if shown_host != "127.0.0.1":
        chat += ["--host", shown_host]
    if addresses.grpc_port != 50051:
        chat += ["--grpc-port", str(addresses.grpc_port)]
    return [
        "",
        "Ask the model over HTTP, or from another terminal with the command:",
        "",
        *keys,
        curl("/v1/chat/completions", messages=[{"role": "user", "content": QUESTION}]),
        "",
        shlex.join(chat),
        "",
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(str(part) for part in value) or "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "auto" if value is None or value == "" else str(value)


def _command_name() -> str:
    """`polychip` if the shell finds it, else the path of this installation's command."""
    if shutil.which("polychip"):
        return "polychip"
    path = Path(sys.executable).parent / "polychip"
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
