"""The command `polychip`: a group of commands, each loaded when it is called.

Loading late keeps every command quick: `polychip chat` imports neither torch nor the control plane.
"""

import importlib
import importlib.metadata
import sys

import click
from typing_extensions import override

from scripts.cli.interruption import EXIT_INTERRUPTED

COMMANDS = {
    "serve": "scripts.cli.serve:serve",
    "chat": "scripts.cli.chat:chat",
    "status": "scripts.cli.status:status",
    "health": "scripts.cli.health:health",
    "cache": "scripts.cli.cache:cache",
    "plan": "scripts.cli.plan:plan",
    "doctor": "scripts.cli.doctor:doctor",
    "bench": "scripts.cli.bench:bench",
    "calibrate": "scripts.cli.calibrate:calibrate",
    "control-plane": "scripts.cli.processes:control_plane",
    "worker": "scripts.cli.processes:worker",
}


class LazyGroup(click.Group):
    """A group whose commands are imported by name when they are asked for."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order a newcomer needs them."""
        del ctx
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    @override
    def invoke(self, ctx: click.Context) -> object:
        """Ctrl-C has one exit status, however early it comes; commands may say more of it."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            sys.exit(EXIT_INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(importlib.metadata.version("polychip"), prog_name="polychip")
def main() -> None:
    """Serves large language models across many chips of any make.

    Exit status: 0 done, 1 error, 2 wrong usage, 3 the service is not reachable, 130 interrupted.
    """


if __name__ == "__main__":
    main()
