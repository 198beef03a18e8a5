"""`polychip control-plane` and `polychip worker`: the single processes, for other launchers."""

import os
import sys

import click

from scripts.child_process import quiet_grpc

# Their options are theirs: everything is handed on, --help included; -h is its short form.
PASS_ON = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


def _become(module: str, arguments: tuple[str, ...]) -> None:
    sys.stdout.flush()
    passed_on = ["--help" if argument == "-h" else argument for argument in arguments]
    command = [sys.executable, "-m", module, *passed_on]
    os.execve(sys.executable, command, quiet_grpc(os.environ))


@click.command(name="control-plane", context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def control_plane(arguments: tuple[str, ...]) -> None:
    """Runs the control plane alone."""
    _become("control_plane", arguments)


@click.command(context_settings=PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def worker(arguments: tuple[str, ...]) -> None:
    """Runs one chip worker alone."""
    _become("chip_worker", arguments)
