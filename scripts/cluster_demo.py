"""The demonstration of `scripts/cluster demo`: an answer that outlives the worker that computes it.

It runs in the container of the control plane, from where no other container can be touched. What is
to be done outside it asks for on standard output, a line each; people read standard error.

    this process --"crash chip0 7"--> scripts/cluster --kill -KILL 7--> container of chip0

Exit status: 0 if everything was as it should be, 1 if not.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click

from scripts.cli.common import sendable_key
from scripts.client import ClientError, PolychipClient, ServiceRefused
from scripts.generation import Generation, Piece

PROMPT = "The history of bread is long. People first baked it"
POLL_S = 0.5
NEAR_TIE = 1e-3
"""Two tokens whose log-probabilities differ by less may change places by rounding alone."""

REMEDIES = {
    "UNAUTHENTICATED": "; give a key with --api-key or POLYCHIP_API_KEY",
    "DEADLINE_EXCEEDED": "; an answer may take {:g} s: see what else keeps this machine busy",
}
"""By the name of the gRPC status; the number is the patience."""

Say = Callable[[str], None]
Status = Mapping[str, object]


@dataclass
class Answer:
    """What came of one request. gaps: by how much each token won over the next likeliest.

    token_times: when each came, in seconds of a monotonic clock.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    failovers: int = 0
    lost: bool = False
    misplaced: bool = False

    def add(self, piece: Piece, now: float) -> None:
        """Takes the next piece."""
        self.misplaced |= bool(piece.token_ids) and piece.first_index != len(self.token_ids)
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.token_times += [now] * len(piece.token_ids)
        self.gaps += [top.logprobs[0] - top.logprobs[1] for top in piece.top_tokens]
        if piece.usage is not None:
            self.failovers = piece.usage.failovers

    @property
    def longest_pause_s(self) -> float:
        """Longest wait for a token after the first."""
        pairs = zip(self.token_times, self.token_times[1:], strict=False)
        return max((later - earlier for earlier, later in pairs), default=0.0)


@dataclass(frozen=True)
class Victim:
    """A worker process that computes the answer, to be killed."""

    group: str
    worker: str
    pid: int
    incarnation: int


def victim_of(status: Status) -> Victim | None:
    """Rank 0 of the group that runs a request; None if none does.

    Raises ClientError if several do: nothing says which of them has the demonstration's.
    """
    busy = [group for group in _rows(status, "groups") if group["running"] and group["ranks"]]
    if len(busy) > 1:
        raise ClientError(
            f"{len(busy)} groups run requests, so somebody else uses the service, and it is not "
            "known which worker computes this answer: end the others' requests and start again"
        )
    for group in busy:
        ranks = group["ranks"]
        assert isinstance(ranks, list)
        for worker in _rows(status, "workers"):
            if worker["id"] == ranks[0]:
                pid, incarnation = worker["pid"], worker["incarnation"]
                assert isinstance(pid, int)
                assert isinstance(incarnation, int)
                return Victim(str(group["id"]), str(worker["id"]), pid, incarnation)
    return None


def all_serve(status: Status) -> bool:
    """Every worker is there and serves, in a group that serves."""
    workers, groups = _rows(status, "workers"), _rows(status, "groups")
    states = [str(each["state"]) for each in (*workers, *groups)]
    return bool(workers) and set(states) == {"serving"}


def is_back(status: Status, victim: Victim) -> bool:
    """A new process stands in the victim's place and serves, and all others do."""
    return all_serve(status) and any(
        worker["id"] == victim.worker and worker["incarnation"] != victim.incarnation
        for worker in _rows(status, "workers")
    )


def difference(undisturbed: Answer, disturbed: Answer) -> tuple[bool, str]:
    """(acceptable, in words): equal answers, or such as part at a near tie."""
    first, second = undisturbed.token_ids, disturbed.token_ids
    if first == second and undisturbed.text == disturbed.text:
        return True, f"the text is the undisturbed one, token for token ({len(first)} tokens)"
    if first == second:
        return False, f"the {len(first)} tokens are the same, but their text differs (see above)"
    length = min(len(first), len(second))
    place = next((each for each in range(length) if first[each] != second[each]), length)
    if place < length:
        gap = undisturbed.gaps[place]
        if gap < NEAR_TIE:
            return True, (
                f"the text is the undisturbed one up to token {place}, where the two likeliest "
                f"tokens differ by {gap:.1e}: rounding may choose either"
            )
        return False, (
            f"the text differs from token {place} on, which had won by {gap:.3f} in "
            f"log-probability (see both above)"
        )
    return False, f"one text has {len(first)} tokens, the other {len(second)}"


class Demonstration:
    """Two runs of one request, the second with a crash. `ask` does what only the host can do."""

    def __init__(self, client: PolychipClient, tokens: int, patience_s: float, ask: Say) -> None:
        self._client = client
        self._tokens = tokens
        self._patience_s = patience_s
        self._ask = ask
        self._victim: Victim | None = None
        self._crashed_at = 0.0
        self._back_after_s: float | None = None

    def run(self) -> bool:
        """Shows it and says what is right and what is not; True if all is right.

        Raises ClientError if the service fails, or does not serve in time.
        """
        if not self._wait(lambda: all_serve(self._client.status())):
            raise ClientError(f"waited {self._patience_s:g} s in vain until every worker serves")
        say(f"1. The undisturbed run: {self._tokens} tokens, always the likeliest.")
        undisturbed = self._answer(lambda _: None)
        if undisturbed.failovers:
            say(f"   (Taken over {undisturbed.failovers} times by itself: is this machine busy?)")
        say("2. The same again; its worker is killed after a third of the tokens.")
        disturbed = self._answer(self._disturb)
        if self._victim is None:
            say("Not killed: the answer ended before the control plane said who computes it.")
            return False
        say(f"3. Waiting until {self._victim.worker} serves again, {self._patience_s:g} s at most.")
        self._wait(self._look_whether_back)
        return verdict(self._facts(self._victim, undisturbed, disturbed))

    def _facts(
        self, victim: Victim, undisturbed: Answer, disturbed: Answer
    ) -> tuple[tuple[bool, str], ...]:
        back_after_s = self._back_after_s
        return (
            (not disturbed.lost, "the client's stream was never broken"),
            (not disturbed.misplaced, "no token was lost, none came twice"),
            (
                len(disturbed.token_ids) == self._tokens,
                f"the answer went on to its end: {len(disturbed.token_ids)} of {self._tokens} "
                f"tokens, longest pause {disturbed.longest_pause_s:.1f} s "
                f"({undisturbed.longest_pause_s:.1f} s undisturbed)",
            ),
            (disturbed.failovers > 0, f"it was taken over: failovers {disturbed.failovers}"),
            difference(undisturbed, disturbed),
            (
                back_after_s is not None,
                f"{victim.worker} serves again in a new process"
                + ("" if back_after_s is None else f", {back_after_s:.0f} s after the crash"),
            ),
        )

    def _answer(self, after_each: Callable[[Answer], None]) -> Answer:
        """One run with an empty prefix cache, shown as it comes; within the patience."""
        self._client.flush_cache()
        answer = Answer()
        generation = Generation(
            prompt=PROMPT,
            temperature=0.0,
            max_tokens=self._tokens,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=2,
            deadline_s=self._patience_s,
        )

        def lost() -> None:
            answer.lost = True

        click.echo(f"   {PROMPT}", nl=False, err=True)
        try:
            for piece in self._client.generate(generation, lost):
                answer.add(piece, time.monotonic())
                click.echo(piece.text.replace("\n", "\n   "), nl=False, err=True)
                after_each(answer)
        finally:
            click.echo(err=True)
        return answer

    def _disturb(self, answer: Answer) -> None:
        """After each piece: crashes the worker in time, then looks out for it."""
        if self._victim is not None:
            self._look_whether_back()
        elif len(answer.token_ids) >= self._tokens // 3:
            self._crash()

    def _crash(self) -> None:
        victim = self._victim = victim_of(self._client.status())
        if victim is not None:
            self._crashed_at = time.monotonic()
            self._ask(f"crash {victim.worker} {victim.pid}")
            click.echo(f" [{victim.worker} of {victim.group} is killed here]", nl=False, err=True)

    def _look_whether_back(self) -> bool:
        assert self._victim is not None
        if self._back_after_s is None and is_back(self._client.status(), self._victim):
            self._back_after_s = time.monotonic() - self._crashed_at
        return self._back_after_s is not None

    def _wait(self, holds: Callable[[], bool]) -> bool:
        """True once it holds; False if it does not in time."""
        deadline = time.monotonic() + self._patience_s
        while not holds():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True


def verdict(facts: tuple[tuple[bool, str], ...]) -> bool:
    """Says each fact with whether it is so; True if all are."""
    say("Verdict:")
    for right, words in facts:
        say(f"  {'ok    ' if right else 'FAILED'} {words}")
    return all(right for right, _ in facts)


def say(line: str) -> None:
    """A line for people."""
    click.echo(line, err=True)


def _rows(status: Status, name: str) -> list[Mapping[str, object]]:
    rows = status[name]
    assert isinstance(rows, list)
    return rows


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the service.")
@click.option("--grpc-port", default=50051, show_default=True, help="Its gRPC port.")
@click.option(
    "--api-key",
    type=sendable_key,
    metavar="KEY",
    envvar="POLYCHIP_API_KEY",
    help="Its key, if any.",
)
@click.option("--tokens", default=120, show_default=True, help="Length of the answers.")
@click.option(
    "--patience", default=180.0, show_default=True, help="Most seconds of each wait and answer."
)
def main(host: str, grpc_port: int, api_key: str | None, tokens: int, patience: float) -> None:
    """Shows that an answer outlives its worker; asks on standard output for the crash."""
    try:
        with PolychipClient(host, grpc_port, api_key) as client:
            right = Demonstration(client, tokens, patience, click.echo).run()
    except ClientError as error:
        code = error.code if isinstance(error, ServiceRefused) else ""
        say(f"Error: {error}{REMEDIES.get(code, '').format(patience)}")
        right = False
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
