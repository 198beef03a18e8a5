"""Calls from arrival to end: the table, several choices behind one reader, the core's news."""

import threading
from random import Random

import anyio
import anyio.lowlevel
import pytest

from control_plane.errors import (
    DeadlineExceeded,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    RequestError,
    ServiceUnavailable,
    WorkerFailure,
)
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.generation_input import TextPrompt, TokenPrompt
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    End,
    Failed,
    FlushCache,
    RequestFacts,
    ServingChanged,
    Submit,
    TokenDelta,
    Tokens,
)
from tests.control_plane.intake.fake_core import END, delta, scores, until
from tests.control_plane.intake.tiny_intake import tiny_intake, wanting

pytestmark = pytest.mark.anyio


@pytest.fixture
def events():
    return []


@pytest.fixture
def made(tiny_model, events):
    made = tiny_intake(tiny_model, events.append)
    yield made
    made.pool.close()


@pytest.fixture
def book(made):
    return AnswerBook(made.parts)


@pytest.fixture
def gate(monkeypatch):
    """Holds every thread that tokenizes until it is set."""
    gate, encode = threading.Event(), Tokenizer.encode

    def slow(self, text, *, add_special):
        gate.wait(10)
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield gate
    gate.set()


async def all_of(generation):
    pieces = []
    while (piece := await generation.next_piece()) is not None:
        pieces.append(piece)
    return pieces


def tell(book, request, first_index, text, *more):
    book.deliver(delta(request, first_index, [*text.encode(), *more]))


def submitted(events):
    return [event.request for event in events if isinstance(event, Submit)]


def kinds(events):
    return [type(event) for event in events]


# -------------------------------------------------------------------- one choice


async def test_a_call_from_start_to_end(book, events, made):
    with book.open("r", "grpc") as generation:
        await generation.start(wanting(seed=7))
        (request,) = submitted(events)
        book.deliver(Accepted("r", 50))
        tell(book, request, 0, "ab", END)
        (piece,) = await all_of(generation)
        assert generation.admitted.request_id == "r"
        assert book.running_count == 1
    assert (piece.text, piece.finish_reason) == ("ab", FinishReason.STOP)
    usage = piece.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.seed) == (2, 3, 7)
    assert (usage.cached_tokens, usage.group_id) == (3, "g1")
    assert (usage.failovers, usage.retractions) == (1, 2)
    assert events == [Submit(request), End("r", 3)]
    assert book.running_count == made.metrics.in_progress == 0


async def test_the_limit_of_the_core_is_heeded(book, events):
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        book.deliver(Accepted("r", 2))
        tell(book, submitted(events)[0], 0, "abc")
        (piece,) = await all_of(generation)
    assert (piece.token_ids, piece.finish_reason) == ((97, 98), FinishReason.LENGTH)
    assert events[1:] == [End("r", 2)]


async def test_a_reader_that_waits_is_woken(book, events):
    pieces = []
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        (request,) = submitted(events)
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                pieces.extend(await all_of(generation))

            tasks.start_soon(read)
            for index, letter in enumerate("abc"):
                await anyio.sleep(0.001)
                tell(book, request, index, letter)
            tell(book, request, 3, "", END)
    assert "".join(piece.text for piece in pieces) == "abc"
    assert [piece.finish_reason for piece in pieces][-1] is FinishReason.STOP


async def test_a_failure_comes_after_what_was_said(book, events):
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        (request,) = submitted(events)
        tell(book, request, 0, "ab")
        book.deliver(Failed("r", WorkerFailure("lost")))
        tell(book, request, 2, "c")
        assert (await generation.next_piece()).text == "ab"
        with pytest.raises(WorkerFailure, match="lost"):
            await generation.next_piece()
    assert kinds(events) == [Submit]
    assert book.running_count == 0


async def test_leaving_early_cancels_and_late_effects_are_dropped(book, events, made):
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        (request,) = submitted(events)
        tell(book, request, 0, "ab")
        await generation.next_piece()
    assert kinds(events) == [Submit, Cancel]
    tell(book, request, 2, "c")
    book.deliver(Failed("r", WorkerFailure("late")))
    assert book.running_count == 0
    assert made.metrics.of("request_finished")[0][0] == "CANCELLED"


async def test_leaving_after_the_end_does_not_cancel(book, events):
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        tell(book, submitted(events)[0], 0, "a", END)
    assert kinds(events) == [Submit, End]


@pytest.mark.parametrize("error", [QueueFull("full"), ServiceUnavailable("no group")])
async def test_a_refusal_of_the_core_is_raised_at_the_start(tiny_model, error):
    events = []

    def post(event) -> None:
        events.append(event)
        if isinstance(event, Submit):
            book.deliver(Failed(event.request.request_id, error))

    made = tiny_intake(tiny_model, post)
    book = AnswerBook(made.parts)
    with pytest.raises(type(error)), book.open("r", "http") as generation:
        await generation.start(wanting(n=3))
    assert kinds(events) == [Submit]
    assert made.metrics.of("request_finished") == [(error.reason, 0.0)]
    made.pool.close()


async def test_logits_for_debugging(book, events):
    with book.open("", "grpc") as generation:
        await generation.start(
            wanting(max_tokens=1, ignore_eos=True, wants_logits=True, target_group="g7")
        )
        (request,) = submitted(events)
        assert (request.wants_logits, request.target_group) == (True, "g7")
        book.deliver(delta(request, 0, [5], logits=b"floats"))
        await all_of(generation)
        assert generation.logits == b"floats"


# -------------------------------------------------------------------- ids


@pytest.mark.parametrize(
    ("request_id", "said"), [("x" * 129, "129 characters"), ("a\x1b[2J", "cannot be printed")]
)
async def test_ids_that_are_no_good(book, made, request_id, said):
    with (
        pytest.raises(InvalidRequest, match=f"^request_id: .*{said}") as caught,
        book.open(request_id, "http"),
    ):
        pass
    assert caught.value.field == "request_id"
    assert len(caught.value.message) < 400
    assert (book.running_count, made.metrics.in_progress) == (0, 0)


async def test_an_id_in_use_is_refused_and_the_one_who_has_it_goes_on(book, events):
    with book.open("r", "http") as generation:
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="'r' is running"), book.open("r", "grpc"):
                pass
        await generation.start(wanting())
        tell(book, submitted(events)[0], 0, "a", END)
        assert (await all_of(generation))[-1].text == "a"
    with book.open("r", "http") as generation:
        await generation.start(wanting())


async def test_ids_of_choices_are_taken_too_in_both_directions(book):
    with book.open("r", "http") as several:
        await several.start(wanting(n=2))
        with pytest.raises(InvalidRequest, match="'r/1' is running"), book.open("r/1", "http"):
            pass
    with book.open("r/1", "http") as single:
        with (
            pytest.raises(InvalidRequest, match="'r/1' is running"),
            book.open("r", "http") as several,
        ):
            await several.start(wanting(n=2))
        await single.start(wanting())
    with book.open("r", "http") as several:
        await several.start(wanting(n=2))


async def test_an_empty_id_is_drawn(book):
    with book.open("", "http") as one, book.open("", "http") as other:
        assert len(one.request_id) == 32
        assert one.request_id != other.request_id


# -------------------------------------------------------------------- several choices


async def test_choices_are_merged_fairly_and_usage_comes_last(book, events):
    with book.open("r", "http") as generation:
        await generation.start(
            wanting(TextPrompt("hi"), TokenPrompt((1, 2, 3)), n=2, seed=5, max_tokens=3)
        )
        requests = submitted(events)
        assert [each.request_id for each in requests] == ["r/0", "r/1", "r/2", "r/3"]
        order = []
        for index in range(2):
            for request in requests:
                tell(book, request, index, "a")
            order += [(await generation.next_piece()).choice for _ in range(4)]
        assert order == [0, 1, 2, 3] * 2
        for request in reversed(requests):
            tell(book, request, 2, "z")
        last = await all_of(generation)
    assert [piece.choice for piece in last] == [3, 2, 1, 0]
    assert [piece.usage is None for piece in last] == [True, True, True, False]
    usage = last[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 12)
    assert (usage.cached_tokens, usage.failovers, usage.retractions) == (6, 4, 8)
    assert events[4:] == [End(f"r/{index}", 3) for index in (3, 2, 1, 0)]


async def test_a_choice_that_is_read_late_starves_nobody(book, events):
    """One choice gets new tokens before every read; the other is read all the same."""
    with book.open("r", "http") as generation:
        await generation.start(wanting(n=2))
        loud, quiet = submitted(events)
        tell(book, loud, 0, "a")
        tell(book, quiet, 0, "b")
        seen = []
        for index in range(1, 4):
            tell(book, loud, index, "a")
            seen.append((await generation.next_piece()).choice)
        assert 1 in seen


async def test_one_failing_choice_fails_the_call_and_cancels_the_rest(book, events, made):
    with book.open("r", "http") as generation:
        await generation.start(wanting(n=4))
        requests = submitted(events)
        tell(book, requests[0], 0, "a", END)
        tell(book, requests[1], 0, "b")
        book.deliver(Failed("r/2", WorkerFailure("lost")))
        tell(book, requests[3], 0, "late")
        assert [(await generation.next_piece()).choice for _ in range(2)] == [0, 1]
        with pytest.raises(WorkerFailure):
            await generation.next_piece()
    told = events[4:]
    assert told[0] == End("r/0", 2)
    assert {event.request_id for event in told[1:]} == {"r/1", "r/3"}
    assert kinds(told) == [End, Cancel, Cancel]
    assert made.metrics.of("request_finished") == [("WORKER_FAILURE", 0.0)]


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_happens_every_choice_ends_once_in_the_core(tiny_model, seed):
    random, live, told = Random(seed), {}, []

    def post(event) -> None:
        if isinstance(event, Submit):
            live[event.request.request_id] = event.request
            book.deliver(Accepted(event.request.request_id, 100))
        else:
            told.append(event.request_id)
            live.pop(event.request_id)

    made = tiny_intake(tiny_model, post)
    book = AnswerBook(made.parts)
    counts, error = {}, None
    with book.open("r", "grpc") as generation:
        await generation.start(
            wanting(*[TextPrompt("hi")] * random.randint(1, 3), n=random.randint(1, 4))
        )
        while live and error is None:
            request = random.choice(list(live.values()))
            core_id = request.request_id
            what = random.random()
            if what < 0.02:
                live.pop(core_id)
                book.deliver(Failed(core_id, WorkerFailure("lost")))
            elif what < 0.04:
                book.cancel("r", "stop it")
            elif what < 0.05:
                break
            else:
                first = counts.get(core_id, 0)
                ids = [random.choice((97, 98, END)) for _ in range(random.randint(1, 3))]
                counts[core_id] = first + len(ids)
                book.deliver(delta(request, first, ids))
            try:
                while random.random() < 0.5 and live:
                    with anyio.move_on_after(0):
                        await generation.next_piece()
            except RequestError as raised:
                error = raised
    assert live == {}
    assert len(told) == len(set(told))
    assert (book.running_count, made.metrics.in_progress) == (0, 0)
    made.pool.close()


@pytest.mark.parametrize("fields", [{}, {"echo": True, "max_tokens": 0}])
async def test_others_get_a_turn_between_many_choices_and_may_cancel(book, events, made, fields):
    opened = []
    wanted = wanting(*[TokenPrompt((1,) * 255)] * 4, n=32, **fields)

    async def call() -> None:
        with book.open("r", "http") as generation:
            opened.append(generation)
            with pytest.raises(RequestCancelled, match="enough"):
                await generation.start(wanted)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        while not (opened and list(opened[0].core_ids)):
            await anyio.lowlevel.checkpoint()
        assert book.cancel("r", "enough")
    requests = submitted(events)
    assert (0 < len(requests) < 128) != bool(fields)
    cancelled = [event.request_id for event in events if isinstance(event, Cancel)]
    assert sorted(cancelled) == sorted(each.request_id for each in requests)
    assert [call[0] for call in made.metrics.of("request_finished")] == ["CANCELLED"]


# -------------------------------------------------------------------- scores, no output


async def test_scores_only(book, events, made):
    with book.open("r", "http") as generation:
        await generation.start(wanting(TextPrompt("abc"), max_tokens=0, prompt_top_tokens=1))
        (request,) = submitted(events)
        assert request.max_tokens == 1
        both = scores(request)
        book.deliver(Tokens(delta(request, 0, [9]).deltas, both.prompt_deltas))
        (piece,) = await all_of(generation)
    assert (piece.token_ids, piece.text, piece.prompt_deltas) == ((), "", both.prompt_deltas)
    assert (piece.usage.prompt_tokens, piece.usage.completion_tokens) == (3, 0)
    assert piece.usage.group_id == "g1"
    assert events[1:] == [End("r", 0)]
    assert made.metrics.of("generation_tokens") == []
    assert made.metrics.of("prompt_tokens") == [(3, 0)]


async def test_an_echo_alone_needs_no_core(book, events, made):
    with book.open("r", "http") as generation:
        await generation.start(wanting(n=2, max_tokens=0, echo=True))
        pieces = await all_of(generation)
    assert [piece.choice for piece in pieces] == [0, 1]
    assert pieces[-1].usage.prompt_tokens == 2
    assert events == []
    assert [call[0] for call in made.metrics.of("request_finished")] == ["length"]


# -------------------------------------------------------------------- cancelled


@pytest.mark.usefixtures("gate")
async def test_a_call_is_cancelled_while_its_prompt_waits_for_a_thread(book, events, made):
    raised = []

    async def call() -> None:
        with (
            pytest.raises(RequestCancelled, match="by name") as caught,
            book.open("r", "grpc") as generation,
        ):
            await generation.start(wanting())
        raised.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await until(lambda: made.budget.pieces_count == 1)
        assert book.running_count == 1
        assert book.cancel("r", "by name")
        assert not book.cancel("r", "twice")
    assert raised
    assert events == []
    assert (book.running_count, made.metrics.in_progress) == (0, 0)


async def test_a_call_is_cancelled_before_it_was_read(book, events):
    with book.open("r", "http") as generation:
        assert book.cancel("r", "early")
        with pytest.raises(RequestCancelled, match="early"):
            await generation.start(wanting())
    assert events == []
    assert not book.cancel("r", "late")


async def test_a_running_call_is_cancelled_with_all_its_choices(book, events):
    with book.open("r", "http") as generation:
        await generation.start(wanting(n=2))
        assert not book.cancel("r/0", "choices have no name of their own")
        assert book.cancel("r", "enough")
        with pytest.raises(RequestCancelled, match="enough"):
            await generation.next_piece()
    assert kinds(events) == [Submit, Submit, Cancel, Cancel]


async def test_a_finished_call_is_not_cancelled(book, events):
    with book.open("r", "http") as generation:
        await generation.start(wanting())
        tell(book, submitted(events)[0], 0, "a", END)
        assert not book.cancel("r", "too late")
        assert len(await all_of(generation)) == 1
    assert kinds(events) == [Submit, End]


@pytest.mark.parametrize(
    ("left_at_s", "outcome"),
    [(0.5, "CANCELLED"), (0.95, "DEADLINE_EXCEEDED"), (2.0, "DEADLINE_EXCEEDED")],
)
async def test_a_client_that_leaves_at_its_deadline_is_not_counted_as_one_that_gave_up(
    book, made, left_at_s, outcome
):
    with book.open("mine", "grpc") as generation:
        await generation.start(wanting(deadline=made.now + 1.0))
        made.now += left_at_s
    assert [call[0] for call in made.metrics.of("request_finished")] == [outcome]


@pytest.mark.usefixtures("gate")
async def test_the_deadline_holds_while_a_prompt_waits_for_a_thread(book, events, made):
    with pytest.raises(DeadlineExceeded), book.open("r", "grpc") as generation:
        await generation.start(wanting(deadline=made.now + 0.02))
    assert events == []


async def test_an_error_of_the_block_is_the_end_of_the_call(book, made):
    with pytest.raises(InvalidRequest), book.open("r", "grpc"):
        raise InvalidRequest("prompt: is missing", field="prompt")
    assert made.metrics.of("request_finished") == [("INVALID_REQUEST", 0.0)]


# -------------------------------------------------------------------- the whole table


async def test_draining_and_failing_all(book, events):
    book.deliver(ServingChanged(("g0", "g1")))
    assert book.serving_group_ids == ("g0", "g1")
    with book.open("r", "http") as generation, book.open("s", "http") as arrived:
        await generation.start(wanting())
        book.refuse_new("draining")
        assert book.serving_group_ids == ()
        with pytest.raises(ServiceUnavailable, match="draining"), book.open("t", "http"):
            pass
        await arrived.start(wanting())
        assert book.running_count == 2
        book.fail_all("stopped")
        for each in (generation, arrived):
            with pytest.raises(ServiceUnavailable, match="stopped"):
                await each.next_piece()
    assert kinds(events) == [Submit, Submit, Cancel, Cancel]


async def test_flushes_are_answered_in_order_also_when_a_caller_left(book, events):
    freed = []

    async def flush() -> None:
        freed.append(await book.flush_cache())

    async with anyio.create_task_group() as tasks:
        with anyio.move_on_after(0.01):
            await book.flush_cache()
        tasks.start_soon(flush)
        await anyio.sleep(0.01)
        book.deliver(CacheFlushed(1))
        book.deliver(CacheFlushed(2))
        book.deliver(CacheFlushed(3))
    assert freed == [2]
    assert events == [FlushCache(), FlushCache()]


# -------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("held", [(), (END,)])
async def test_usage_and_metrics_agree_on_what_a_prompt_cost(book, events, made, held):
    """The first choice that is computed stands for its prompt, whichever speaks first."""

    def say(request, cached_tokens) -> None:
        facts = RequestFacts("g0", cached_tokens=cached_tokens)
        book.deliver(Tokens((TokenDelta(request.request_id, 0, (END,), (), facts),)))

    with book.open("r", "grpc") as generation:
        await generation.start(wanting(TextPrompt("abc"), n=3, resume_output_ids=(held,)))
        first, *others = submitted(events)
        for cached_tokens, request in enumerate([*others, first], 1):
            say(request, cached_tokens)
        pieces = await all_of(generation)
    expected = 1 + len(others)
    usage = next(piece.usage for piece in pieces if piece.usage is not None)
    assert (usage.prompt_tokens, usage.cached_tokens) == (3, expected)
    assert made.metrics.of("prompt_tokens") == [(3, expected)]


async def test_times_and_counts(book, events, made):
    facts = RequestFacts("g0", cached_tokens=1, queue_s=0.5)

    def say(request, first_index, *ids) -> None:
        book.deliver(Tokens((TokenDelta(request.request_id, first_index, ids, (), facts),)))

    with book.open("r", "grpc") as generation:
        await generation.start(wanting(n=2))
        one, other = submitted(events)
        made.now += 2.0
        say(one, 0, 97)
        made.now += 1.0
        say(other, 0, 97)
        made.now += 1.0
        say(one, 1, 97, 97, END, 97)
        made.now += 4.0
        assert made.metrics.in_progress == 1
        say(other, 1, END)
        assert made.metrics.in_progress == 0
        await all_of(generation)
    assert made.metrics.calls == [
        ("request_received", "grpc"),
        ("queue_time", 0.5),
        ("first_token", 2.0),
        ("generation_tokens", 1),
        ("prompt_tokens", 2, 1),
        ("generation_tokens", 1),
        ("inter_token", 2.0, 3),
        ("generation_tokens", 3),
        ("inter_token", 5.0, 1),
        ("generation_tokens", 1),
        ("request_finished", "stop", 8.0),
    ]
