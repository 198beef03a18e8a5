"""The end of an answer, in token order; pieces for slow readers; what the core is told."""

import anyio
import pytest

from control_plane.errors import ServiceUnavailable, WorkerFailure
from control_plane.intake.admission import Admitted
from control_plane.intake.answer_book import AnswerBook
from control_plane.intake.tokenizer import Tokenizer
from control_plane.request import FinishReason, Request, Sampling
from control_plane.scheduling.messages import (
    Accepted,
    CacheFlushed,
    Cancel,
    End,
    Failed,
    FlushCache,
    ServingChanged,
    Submit,
)
from tests.control_plane.intake.fake_core import END, delta

pytestmark = pytest.mark.anyio


@pytest.fixture
def events():
    return []


@pytest.fixture
def book(tiny_model, events):
    return AnswerBook(events.append, Tokenizer(tiny_model.tokenizer, "tiny"))


def admitted(stop=(END,), tokens_max=100, output_ids=(), **fields) -> Admitted:
    request = Request("r", (1, 2), Sampling(0.0, 9), output_ids=tuple(output_ids), **fields)
    return Admitted(request, frozenset(stop), tokens_max)


async def all_of(answer):
    pieces = []
    while (piece := await answer.next_piece()) is not None:
        pieces.append(piece)
    return pieces


def tell(book, request, first_index, text, *more):
    raw = text.encode() if isinstance(text, str) else text
    book.deliver(delta(request, first_index, [*raw, *more]))


async def test_a_stop_token_ends_the_answer_and_is_counted_but_not_shown(book, events):
    wanted = admitted(stop=(END, ord("X")))
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, "abX", *b"cd", END)
        tell(book, wanted.request, 6, "more")
        (piece,) = await all_of(answer)
    assert (piece.text, piece.token_ids) == ("ab", (*b"abX",))
    assert piece.finish_reason is FinishReason.STOP
    assert piece.usage.completion_tokens == 3
    assert events == [Submit(wanted.request), End("r", 3)]


async def test_an_end_token_is_text_less_and_without_it_the_answer_goes_on(book, events):
    wanted = admitted(stop=(), tokens_max=4)
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, "a", END, *b"bcd")
        (piece,) = await all_of(answer)
    assert (piece.text, piece.token_ids) == ("abc", (97, END, 98, 99))
    assert piece.finish_reason is FinishReason.LENGTH
    assert events[1:] == [End("r", 4)]


async def test_a_stop_token_at_the_last_place_is_a_stop(book):
    wanted = admitted(tokens_max=2)
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, "a", END)
        (piece,) = await all_of(answer)
    assert piece.finish_reason is FinishReason.STOP


async def test_the_core_may_lower_the_limit_but_not_raise_it(book, events):
    for limit, count in ((3, 3), (1000, 5)):
        wanted = admitted(tokens_max=5)
        with book.answering(wanted) as answer:
            book.deliver(Accepted("r", limit))
            tell(book, wanted.request, 0, "abcdefgh")
            (piece,) = await all_of(answer)
        assert len(piece.token_ids) == count
        assert events.pop() == End("r", count)


async def test_a_slow_reader_gets_one_piece_and_a_quick_one_many(book):
    wanted = admitted(wants_logprobs=True)
    with book.answering(wanted) as answer:
        for index, byte in enumerate("né👍".encode()):
            tell(book, wanted.request, index, bytes([byte]))
        slow = await answer.next_piece()
        tell(book, wanted.request, 7, "q")
        quick = await answer.next_piece()
        tell(book, wanted.request, 8, "", END)
        await all_of(answer)
    assert (slow.first_index, slow.text, len(slow.logprobs)) == (0, "né👍", 7)
    assert (quick.first_index, quick.text, quick.finish_reason) == (7, "q", None)


async def test_a_reader_that_waits_is_woken(book):
    wanted = admitted()
    pieces = []
    with book.answering(wanted) as answer:
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                pieces.extend(await all_of(answer))

            tasks.start_soon(read)
            for index, byte in enumerate(b"abc"):
                await anyio.sleep(0.001)
                tell(book, wanted.request, index, bytes([byte]))
            tell(book, wanted.request, 3, "", END)
    assert "".join(piece.text for piece in pieces) == "abc"
    assert [piece.finish_reason for piece in pieces][-1] is FinishReason.STOP


async def test_half_a_character_waits_and_a_cut_one_is_replaced_once(book):
    raw = "👍".encode()
    wanted = admitted(tokens_max=3)
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, raw[:2])
        held = await answer.next_piece()
        tell(book, wanted.request, 2, raw[2:3])
        last = await answer.next_piece()
    assert (held.text, held.token_ids) == ("", tuple(raw[:2]))
    assert last.text == "\ufffd"


async def test_a_failure_comes_after_what_was_said(book, events):
    wanted = admitted()
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, "ab")
        book.deliver(Failed("r", WorkerFailure("lost")))
        tell(book, wanted.request, 2, "c")
        assert (await answer.next_piece()).text == "ab"
        with pytest.raises(WorkerFailure, match="lost"):
            await answer.next_piece()
    assert events == [Submit(wanted.request)]
    assert book.running_count == 0


async def test_leaving_early_cancels_and_late_effects_are_dropped(book, events):
    wanted = admitted()
    with book.answering(wanted) as answer:
        tell(book, wanted.request, 0, "ab")
        await answer.next_piece()
    assert [type(event) for event in events] == [Submit, Cancel]
    tell(book, wanted.request, 2, "c")
    book.deliver(Failed("r", WorkerFailure("late")))
    assert book.running_count == 0


async def test_leaving_after_the_end_does_not_cancel(book, events):
    wanted = admitted()
    with book.answering(wanted):
        tell(book, wanted.request, 0, "a", END)
    assert [type(event) for event in events] == [Submit, End]


async def test_a_repeated_token_from_the_core_is_a_broken_promise(book):
    wanted = admitted()
    with book.answering(wanted):
        tell(book, wanted.request, 0, "ab")
        with pytest.raises(AssertionError):
            tell(book, wanted.request, 1, "b")


@pytest.mark.parametrize(
    ("held", "tokens_max", "reason"),
    [
        ([97, END], 10, FinishReason.STOP),
        ([97, 98], 2, FinishReason.LENGTH),
    ],
)
async def test_a_complete_answer_resumed_needs_no_core(book, events, held, tokens_max, reason):
    wanted = admitted(output_ids=held, tokens_max=tokens_max)
    with book.answering(wanted) as answer:
        (piece,) = await all_of(answer)
    assert (piece.text, piece.token_ids, piece.finish_reason) == ("", (), reason)
    assert piece.usage.completion_tokens == 2
    assert events == []


async def test_an_answer_resumed_at_the_core_s_limit_ends_at_once(book, events):
    wanted = admitted(output_ids=b"abc")
    with book.answering(wanted) as answer:
        book.deliver(Accepted("r", 3))
        (piece,) = await all_of(answer)
    assert piece.finish_reason is FinishReason.LENGTH
    assert events[1:] == [End("r", 3)]


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


async def test_draining_and_failing_all(book, events):
    book.deliver(ServingChanged(("g0", "g1")))
    assert book.serving_group_ids == ("g0", "g1")
    wanted = admitted()
    with book.answering(wanted) as answer:
        book.refuse_new("draining")
        assert book.serving_group_ids == ()
        with pytest.raises(ServiceUnavailable, match="draining"), book.answering(wanted):
            pass
        assert book.running_count == 1
        book.fail_all("stopped")
        with pytest.raises(ServiceUnavailable, match="stopped"):
            await answer.next_piece()
    assert [type(event) for event in events] == [Submit, Cancel]
