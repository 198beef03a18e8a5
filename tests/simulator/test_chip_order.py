"""Order on a simulated chip: work happens late, and one missing synchronization shows."""

import random

import pytest
import torch

from backends.errors import UnsupportedOperation

EXECUTIONS = ("latest", "earliest", "random")


def numbers(*values):
    return torch.tensor(values, dtype=torch.float32)


def put(chip, *values):
    """A tensor on the chip with these values, which kernels see."""
    tensor = chip.allocate_tensor((len(values),), torch.float32)
    chip.copy_from_host(numbers(*values), tensor, blocking=True)
    chip.synchronize()
    return tensor


def get(chip, tensor):
    target = torch.zeros_like(tensor)
    chip.copy_to_host(tensor, target, blocking=True)
    return target


def add_one(chip, tensor, stream=None):
    chip.launch("add", lambda: tensor.add_(1), reads=[tensor], writes=[tensor], stream=stream)


def test_the_host_reads_old_bytes_until_it_synchronizes(new_chip):
    chip = new_chip()
    tensor = put(chip, 1, 2)
    add_one(chip, tensor)
    assert chip.in_flight == 1
    assert torch.equal(tensor, numbers(1, 2))
    chip.synchronize()
    assert chip.in_flight == 0
    assert torch.equal(tensor, numbers(2, 3))


def test_an_async_copy_to_the_host_is_there_after_synchronizing(new_chip):
    chip = new_chip()
    tensor, target = put(chip, 1, 2), torch.zeros(2)
    chip.copy_to_host(tensor, target)
    assert torch.equal(target, numbers(0, 0))
    chip.synchronize()
    assert torch.equal(target, numbers(1, 2))


def test_an_async_copy_from_the_host_reads_its_source_late(new_chip):
    chip = new_chip()
    tensor, source = put(chip, 0), numbers(1)
    chip.copy_from_host(source, tensor)
    source[0] = 2
    chip.synchronize()
    assert torch.equal(tensor, numbers(2))


def test_a_fence_covers_what_was_asked_before_it_only(new_chip):
    chip = new_chip()
    tensor = put(chip, 0)
    add_one(chip, tensor)
    fence = chip.fence()
    add_one(chip, tensor)
    fence.wait()
    assert torch.equal(tensor, numbers(1))
    chip.synchronize()
    assert torch.equal(tensor, numbers(2))


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("producer_is_default", [True, False])
def test_streams_are_ordered_by_events_alone(new_chip, is_ordered, producer_is_default):
    chip = new_chip()
    tensor, result = put(chip, 5), put(chip, 0)
    streams = [chip.default_stream, chip.stream()]
    producer, consumer = streams if producer_is_default else reversed(streams)
    add_one(chip, tensor, producer)
    event = producer.record()
    if is_ordered:
        consumer.wait_event(event)
    chip.launch("copy", lambda: result.copy_(tensor), reads=[tensor], writes=[result],
                stream=consumer)  # fmt: skip
    chip.synchronize()
    assert torch.equal(result, numbers(6 if is_ordered else 5))


def test_synchronizing_covers_the_default_stream_only_where_the_profile_says_so(new_chip):
    for covers, expected in (("all_streams", 1), ("default_stream", 0)):
        chip = new_chip(synchronize_covers=covers)
        tensor, side = put(chip, 0), chip.stream()
        add_one(chip, tensor, side)
        chip.synchronize()
        assert tensor[0] == expected
        chip.synchronize(side)
        assert tensor[0] == 1


def test_kernels_see_an_async_copy_after_a_fence_where_the_cache_is_bypassed(new_chip):
    chip = new_chip(stale_reads_after_async_copy=True)
    for way, expected in (("nothing", 1), ("event", 1), ("fence", 2), ("blocking", 2)):
        tensor, result = put(chip, 1), put(chip, 0)
        chip.copy_from_host(numbers(2), tensor, blocking=way == "blocking")
        if way == "event":
            chip.record().synchronize()
        if way == "fence":
            chip.fence()
        chip.copy_on_chip(tensor, result)
        assert torch.equal(get(chip, result), numbers(expected)), way
        # The copy engine reads the memory behind the cache, and leaves the cache as it was.
        assert torch.equal(get(chip, tensor), numbers(2))
        chip.copy_on_chip(tensor, result)
        assert torch.equal(get(chip, result), numbers(expected)), way


def test_a_blocking_copy_comes_after_the_async_copies_before_it(new_chip):
    chip = new_chip(stale_reads_after_async_copy=True)
    tensor = put(chip, 1)
    chip.copy_from_host(numbers(2), tensor)
    chip.copy_from_host(numbers(3), tensor, blocking=True)
    chip.synchronize()
    assert torch.equal(tensor, numbers(3))


def test_memory_of_another_chip_is_seen_after_its_fence(new_chip):
    first, second = new_chip(), new_chip(index=1)
    source, target = put(first, 1), put(second, 0)
    add_one(first, source)
    second.copy_from_peer(first, source, target)
    assert torch.equal(get(second, target), numbers(1))
    first.fence().wait()
    second.copy_from_peer(first, source, target)
    assert torch.equal(get(second, target), numbers(2))


def test_events_have_the_profile_s_quirks(new_chip):
    def ask(**quirks):
        chip = new_chip(**quirks)
        tensor = put(chip, 0)
        start = chip.record()
        chip.launch("add", lambda: tensor.add_(1), writes=[tensor], seconds=1.0)
        end = chip.record()
        return chip, tensor, start, end

    _, tensor, start, end = ask()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_s(end) == pytest.approx(1.0, abs=1e-4)

    _, tensor, start, end = ask(event_query="always_true", event_timing=False)
    assert end.query()
    assert torch.equal(tensor, numbers(0)), "the event lied: the work is not done"
    end.synchronize()
    assert torch.equal(tensor, numbers(1))
    assert start.elapsed_s(end) == 0.0

    *_, end = ask(event_query="unsupported")
    with pytest.raises(UnsupportedOperation, match="wait for a fence"):
        end.query()


def test_asking_an_event_again_and_again_comes_to_an_end(new_chip):
    chip = new_chip()
    chip.launch("wait", lambda: None, seconds=1e-3)
    event = chip.record()
    assert 900 < sum(not event.query() for _ in range(2000)) < 1100


def random_program(chip, seed):
    """Random rightly ordered work on three streams; what the host sees at the end."""
    chance = random.Random(seed)
    streams = [chip.default_stream, chip.stream(), chip.stream()]
    tensors = [put(chip, *range(4)) for _ in range(4)]
    last = {}
    for step in range(60):
        stream = chance.choice(streams)
        source, target = chance.sample(range(4), 2)
        for touched in (source, target):
            for event in last.get(touched, ()):
                stream.wait_event(event)
        match chance.randrange(3):
            case 0:
                chip.launch("mix", lambda s=source, t=target: tensors[t].add_(tensors[s]).fmod_(97),
                            reads=[tensors[source]], writes=[tensors[target]], stream=stream,
                            seconds=chance.random() * 1e-4)  # fmt: skip
            case 1:
                chip.copy_from_host(numbers(step, 1, 2, 3), tensors[target], stream=stream)
            case 2:
                chip.copy_on_chip(tensors[source], tensors[target], stream=stream)
        for touched in (source, target):
            last.setdefault(touched, []).append(stream.record())
        if chance.random() < 0.1:
            chip.fence()
    chip.synchronize()
    return torch.stack([get(chip, tensor) for tensor in tensors]), chip.clock.now_s


@pytest.mark.parametrize("seed", range(5))
def test_right_programs_have_one_result_and_one_time_under_every_execution(new_chip, seed):
    results = [
        random_program(new_chip(execution=execution, seed=chance), seed)
        for execution, chance in [
            ("latest", 0),
            ("earliest", 0),
            *(("random", s) for s in range(4)),
        ]
    ]
    for values, time_s in results[1:]:
        assert torch.equal(values, results[0][0])
        assert time_s == pytest.approx(results[0][1], abs=1e-12)


def test_a_full_queue_makes_the_launch_wait_for_the_oldest(new_chip):
    chip = new_chip(queue_depth=4)
    tensor = put(chip, 0)
    for _ in range(10):
        add_one(chip, tensor)
    assert chip.in_flight == 4
    assert torch.equal(tensor, numbers(6))
