"""`polychip chat`: one answer from the running service, or a conversation."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from scripts.cli.common import Service, connected, service_options
from scripts.client import Generation, Message, Piece, PolychipClient

EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn, and what the model is told first."""

    system: str | None
    temperature: float
    max_tokens: int
    seed: int | None

    def opening(self) -> list[Message]:
        """The conversation before the first question."""
        return [] if self.system is None else [Message("system", self.system)]

    def generation(self, messages: Sequence[Message]) -> Generation:
        """The request for the next answer."""
        return Generation(
            prompt=tuple(messages),
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed,
        )


@click.command()
@click.argument("question", required=False)
@click.option("--system", help="What the model is told first.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0, max=100.0),
    default=0.0,
    show_default=True,
    help="0 is greedy: always the likeliest token.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Seed of the draws; new each time if absent."
)
@service_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs a question.")
def chat(
    question: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    host: str,
    http_port: int,
    grpc_port: int,
    as_json: bool,
) -> None:
    """Asks QUESTION and prints the answer; without a question, a conversation.

    In a conversation /reset forgets what was said, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    settings = ChatSettings(system, temperature, max_tokens, seed)
    with connected(Service(host, http_port, grpc_port)) as client:
        if question is not None:
            _ask(client, settings, question, as_json)
        elif as_json:
            raise click.UsageError("--json needs a question: polychip chat --json QUESTION")
        else:
            _converse(client, settings)


def _ask(client: PolychipClient, settings: ChatSettings, question: str, as_json: bool) -> None:
    messages = [*settings.opening(), Message("user", question)]
    pieces: list[Piece] = []
    try:
        for piece in client.generate(settings.generation(messages)):
            pieces.append(piece)
            if not as_json:
                click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        click.echo()
        sys.exit(EXIT_INTERRUPTED)
    click.echo(json.dumps(_summary(pieces)) if as_json else "")


def _summary(pieces: Sequence[Piece]) -> dict[str, object]:
    usage = pieces[-1].usage
    return {
        "text": "".join(piece.text for piece in pieces),
        "token_ids": [token for piece in pieces for token in piece.token_ids],
        "finish_reason": pieces[-1].finish_reason,
        "usage": None if usage is None else asdict(usage),
    }


def _converse(client: PolychipClient, settings: ChatSettings) -> None:
    names = client.model_info()["names"]
    assert isinstance(names, list)
    interactive = sys.stdin.isatty()
    if interactive:
        click.echo(f"{names[0]} at {client.address}. /reset forgets, Ctrl-C stops, Ctrl-D leaves.")
    messages = settings.opening()
    while (line := _read_line("> " if interactive else "")) is not None:
        if line == "/reset":
            messages = settings.opening()
            continue
        if line:
            messages.append(Message("user", line))
            messages.append(Message("assistant", _answer(client, settings, messages)))


def _read_line(prompt: str) -> str | None:
    """The next line of the user; None at the end (Ctrl-D, Ctrl-C)."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        if prompt:
            click.echo()
        return None


def _answer(client: PolychipClient, settings: ChatSettings, messages: Sequence[Message]) -> str:
    """Prints the answer as it comes; what was said before a Ctrl-C is kept."""
    text = ""
    try:
        for piece in client.generate(settings.generation(messages)):
            text += piece.text
            click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False)
    click.echo()
    return text
