"""`polychip chat`: one answer from the running service, or a conversation."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click

from scripts.cli.common import Service, connected, service_options
from scripts.cli.interruption import EXIT_INTERRUPTED
from scripts.client import RECONNECT_DEADLINE_S, ClientError, PolychipClient, ServiceRefused
from scripts.generation import Generation, Message, Piece


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


@click.command(short_help="Asks one question, or holds a conversation.")
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
    api_key: str | None,
    as_json: bool,
) -> None:
    """Asks QUESTION and prints the answer; without a question, a conversation.

    In a conversation /reset forgets what was said, Ctrl-C stops an answer, Ctrl-D leaves.
    """
    settings = ChatSettings(system, temperature, max_tokens, seed)
    with connected(Service(host, http_port, grpc_port, api_key)) as client:
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
        for piece in client.generate(settings.generation(messages), _say_lost):
            pieces.append(piece)
            if not as_json:
                click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        click.echo()
        sys.exit(EXIT_INTERRUPTED)
    except ClientError:
        # The message that follows gets a line of its own.
        if pieces and not as_json:
            click.echo()
        raise
    click.echo(json.dumps(_summary(pieces)) if as_json else "")


def _say_lost() -> None:
    click.echo(f" [connection lost; trying for {RECONNECT_DEADLINE_S:g} s]", nl=False, err=True)


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
    failed = False
    while (line := _read_line("> " if interactive else "")) is not None:
        if line == "/reset":
            messages = settings.opening()
            continue
        if line:
            question = Message("user", line)
            try:
                answer = _answer(client, settings, [*messages, question])
            except ServiceRefused as error:
                # Such as a conversation longer than the context: what was said before stays.
                click.echo(f"Error: {error}", err=True)
                failed = True
            else:
                messages += [question, Message("assistant", answer)]
    if failed and not interactive:
        sys.exit(1)


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
        for piece in client.generate(settings.generation(messages), _say_lost):
            text += piece.text
            click.echo(piece.text, nl=False)
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False)
    except ClientError:
        if text:
            click.echo()
        raise
    click.echo()
    return text
