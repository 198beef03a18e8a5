"""Threads that tokenize: what waits is bounded, and what nobody waits for is dropped."""

import threading

import anyio
import pytest

from control_plane.errors import QueueFull
from control_plane.intake.byte_budget import bytes_of
from control_plane.intake.tokenizer import Tokenizer
from tests.control_plane.intake.fake_core import until
from tests.control_plane.intake.tiny_intake import tiny_intake

pytestmark = pytest.mark.anyio


@pytest.fixture
def gate(monkeypatch):
    """Holds every thread that tokenizes until it is set; `entered` counts those that came."""
    gate, encode = threading.Event(), Tokenizer.encode
    gate.entered = 0

    def slow(self, text, *, add_special):
        gate.entered += 1
        gate.wait(10)
        return encode(self, text, add_special=add_special)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    yield gate
    gate.set()


@pytest.fixture
def made(tiny_model):
    made = tiny_intake(tiny_model, pieces_max=3, threads_count=2, intake_bytes_max=5000)
    yield made
    made.pool.close()


async def test_no_more_texts_wait_than_may(made, gate):
    jobs = [made.pool.encode("hi") for _ in range(3)]
    with pytest.raises(QueueFull, match="3 prompts wait") as caught:
        made.pool.encode("hi")
    assert caught.value.retry_after_s
    gate.set()
    assert [await job.result() for job in jobs] == [(104, 105)] * 3
    await until(lambda: made.budget.pieces_count == 0)
    assert await made.pool.encode("hi").result() == (104, 105)


async def test_no_more_bytes_wait_than_may(made, gate):
    text = "x" * 3000
    first = made.pool.encode(text)
    with pytest.raises(QueueFull, match=f"{bytes_of(text)} bytes wait .* exceed 5000") as caught:
        made.pool.encode_chat([{"role": "user", "content": text}])
    assert caught.value.retry_after_s
    made.pool.encode("small")
    gate.set()
    await first.result()


async def test_what_is_large_alone_is_taken_when_nothing_waits(made):
    job = made.pool.decode(tuple(range(200)) * 10)
    assert len(await job.result())


async def test_dropped_work_counts_only_while_a_thread_is_at_it(made, gate):
    running = [made.pool.encode("hi") for _ in range(2)]
    await until(lambda: gate.entered == 2)
    waiting = made.pool.encode("waiting")
    for job in (*running, waiting):
        job.abandon()
    assert made.budget.pieces_count == 2
    gate.set()
    await until(lambda: made.budget.pieces_count == 0)
    assert gate.entered == 2


@pytest.mark.usefixtures("gate")
async def test_one_who_leaves_does_not_wait_for_the_thread(made):
    with anyio.move_on_after(0.01) as scope:
        await made.pool.encode("hi").result()
    assert scope.cancelled_caught
    assert made.budget.pieces_count == 1
