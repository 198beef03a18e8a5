"""A chip is ready only after each operation gave the reference's numbers; a wrong one is named."""

import functools

import pytest
import torch

from backends.interface import BackendConfig, open_runtime
from backends.paged_pool import PagedMemoryPool
from backends.plugin import find_backend
from chip_worker.batch import Fault, FaultKind, Ready
from chip_worker.config import WorkerConfig
from chip_worker.session import Session
from chip_worker.shard_loader import ShardLoader
from kernels.spec import SOFT_CAP, WINDOW, Implementation, Support
from tests.fakes.checkpoints import TinyLlama, write_hugging_face
from tests.fakes.compute_group import ComputeGroup, ThreadRuntime, form_command, open_rank
from tests.fakes.tiny_gemma import TinyGemma

OPERATIONS = (
    "add_rms_norm",
    "adjust_logits",
    "attention",
    "embedding",
    "linear",
    "logits",
    "rms_norm",
    "rotary",
    "sample",
    "silu_mul",
    "token_logprobs",
)
# 32 tokens of a chunk and 4 slots.
ROWS_MAX = 36
GEMMA_OPERATIONS = {*OPERATIONS, "gelu_mul", "soft_cap"} - {"silu_mul"}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("model"), TinyLlama())


@pytest.fixture(scope="module")
def gemma_path(tmp_path_factory):
    return write_hugging_face(tmp_path_factory.mktemp("gemma"), TinyGemma(layers=7))


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory):
    """Far more tokens than the reference multiplies."""
    model = TinyLlama(layers=1, vocabulary=12_000)
    return write_hugging_face(tmp_path_factory.mktemp("large"), model)


def report_with(model_path, operation, perturbed, **form):
    """What a rank reports that is to form a group with one wrong kernel.

    perturbed: called with the right function and the arguments.
    """

    class Runtime(ThreadRuntime):
        perturbs = False

        def implementations(self):
            every = super().implementations()
            if not self.perturbs:
                return every
            right = next(each.function for each in every if each.operation == operation)
            return [
                Implementation(
                    operation,
                    "perturbed",
                    functools.partial(perturbed, right),
                    Support(features=(WINDOW, SOFT_CAP)),
                ),
                *(each for each in every if each.operation != operation),
            ]

    rank = open_rank(model_path, runtime_class=Runtime)
    # The probe of the chip alone, which has just passed, knows of no model.
    rank.runtime.perturbs = True
    rank.session.handle(form_command(**form))
    rank.session.close()
    return rank.last


def check_named(report, operation):
    assert isinstance(report, Fault), report
    assert report.kind is FaultKind.DEVICE
    assert f"'{operation}' (implementation 'perturbed'" in report.message
    assert "batch size" in report.message


def spoiled(found):
    """The last row is another one's, as of a kernel that forgets its last tile."""
    parts = list(found) if isinstance(found, tuple) else [found]
    for part in parts:
        if part.is_floating_point():
            part[-1] = part[-1].roll(1) + 0.3 if part[-1].ndim else part[-1] - 0.3
        else:
            part[-1] = part[-1] + 1 if part.dtype != torch.bool else ~part[-1]
    return found


def writes_wrong_values(right, cache, layer, key, value):
    right(cache, layer, key, value.roll(1, dims=1))


def writes_one_layer_only(right, cache, layer, key, value):
    del layer
    right(cache, 0, key, value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_perturbed_operation_is_named(path, operation):
    report = report_with(path, operation, lambda right, *a: spoiled(right(*a)))
    check_named(report, operation)


@pytest.mark.parametrize("operation", sorted(GEMMA_OPERATIONS - {*OPERATIONS}))
def test_a_perturbed_operation_that_other_models_lack_is_named(gemma_path, operation):
    report = report_with(gemma_path, operation, lambda right, *a: spoiled(right(*a)))
    check_named(report, operation)


def attends_one_more(right, cache, layer, query, q_to_kv, scale, window, soft_cap):
    return right(cache, layer, query, q_to_kv, scale, window and window + 1, soft_cap)


def attends_one_less(right, cache, layer, query, q_to_kv, scale, window, soft_cap):
    return right(cache, layer, query, q_to_kv, scale, window and window - 1, soft_cap)


def attends_without_cap(right, cache, layer, query, q_to_kv, scale, window, _soft_cap):
    return right(cache, layer, query, q_to_kv, scale, window, 0.0)


def attends_with_the_usual_scale(right, cache, layer, query, q_to_kv, _scale, window, soft_cap):
    return right(cache, layer, query, q_to_kv, query.shape[2] ** -0.5, window, soft_cap)


@pytest.mark.parametrize(
    "function",
    [attends_one_more, attends_one_less, attends_without_cap, attends_with_the_usual_scale],
)
def test_attention_that_misses_a_windows_edge_a_cap_or_the_scale_is_found(gemma_path, function):
    check_named(report_with(gemma_path, "attention", function), "attention")


def test_a_window_longer_than_a_step_is_probed_at_its_edge(tmp_path):
    """100 tokens in blocks of 4, held in pieces of at most ROWS_MAX."""
    changes = {"sliding_window": 100}
    path = write_hugging_face(tmp_path, TinyGemma(layers=6), config_changes=changes)
    for function in (attends_one_more, attends_one_less):
        report = report_with(path, "attention", function, context_tokens=120)
        check_named(report, "attention")
    # A context that ends before the window does never meets it.
    report = report_with(path, "attention", attends_one_more, context_tokens=100)
    assert isinstance(report, Ready), report


@pytest.mark.parametrize(("base", "name"), [(500.0, "window"), (10_000.0, "whole")])
def test_the_rotary_tables_of_both_kinds_of_layers_are_probed(gemma_path, base, name):
    """A kernel that is wrong for one of the two tables only."""
    del name
    second = base ** (-2 / 8)

    def function(right, heads, positions, table):
        found = right(heads, positions, table)
        at_one = torch.acos(table[1, 1])
        return found * 1.1 if torch.isclose(at_one, torch.tensor(second)) else found

    check_named(report_with(gemma_path, "rotary", function), "rotary")


def test_norms_of_heads_are_probed(gemma_path):
    def function(right, x, weight, epsilon):
        found = right(x, weight, epsilon)
        return found * 1.1 if x.ndim == 3 else found

    check_named(report_with(gemma_path, "rms_norm", function), "rms_norm")


def test_the_scale_of_embeddings_is_probed(gemma_path):
    def function(right, ids, weight, first_row, _scale):
        return right(ids, weight, first_row, 1.0)

    check_named(report_with(gemma_path, "embedding", function), "embedding")


@pytest.mark.parametrize("function", [writes_wrong_values, writes_one_layer_only])
def test_keys_and_values_that_are_not_written_are_found(path, function):
    check_named(report_with(path, "write_kv", function), "write_kv")


@pytest.mark.parametrize("operation", ["linear", "rms_norm", "silu_mul", "rotary", "logits"])
def test_a_wrong_scale_is_found_though_its_cosine_is_one(path, operation):
    report = report_with(path, operation, lambda right, *a: right(*a) * 1.02)
    check_named(report, operation)
    assert "cosine 1.0" in report.message


@pytest.mark.parametrize("operation", ["linear", "embedding", "add_rms_norm"])
@pytest.mark.parametrize("rows", [2, 7, ROWS_MAX])
def test_a_kernel_wrong_from_some_batch_size_on_is_found_there(path, operation, rows):
    def function(right, *arguments):
        found = right(*arguments)
        return spoiled(found) if arguments[0].shape[0] >= rows else found

    report = report_with(path, operation, function)
    check_named(report, operation)
    assert f"batch size {rows}:" in report.message


@pytest.mark.parametrize("operation", ["attention", "sample"])
def test_what_is_not_finite_or_not_the_same_token_is_found(path, operation):
    def function(right, *arguments):
        found = right(*arguments)
        if isinstance(found, tuple):
            return found[0], ~found[1]
        return found.fill_(float("nan"))

    check_named(report_with(path, operation, function), operation)


@pytest.mark.parametrize("rule", range(3, 7))
def test_no_rule_of_adjusting_may_be_forgotten(path, rule):
    """bias, presence, frequency, repetition: the last four but the counts."""
    place = {3: 3, 4: 5, 5: 6, 6: 7}[rule]
    neutral = 1.0 if place == 7 else 0.0

    def function(right, *arguments):
        columns = list(arguments)
        columns[place] = torch.full_like(columns[place], neutral)
        return right(*columns)

    check_named(report_with(path, "adjust_logits", function), "adjust_logits")


@pytest.mark.parametrize("row", [0, 1, 2, 6_001, 11_999])
def test_one_wrong_logit_of_a_large_vocabulary_is_found_wherever_it_is(large_vocabulary, row):
    def function(right, hidden, weight):
        found = right(hidden, weight)
        found[:, row] = found.abs().max() * 1.5
        return found

    check_named(report_with(large_vocabulary, "logits", function), "logits")


@pytest.mark.parametrize("rows", [range(11_999, 12_000), range(7_168, 7_232)], ids=str)
def test_logits_that_a_product_leaves_out_are_found(large_vocabulary, rows):
    """At a large vocabulary: the last one, or a tile in the middle."""

    def function(right, hidden, weight):
        found = right(hidden, weight)
        found[:, rows.start : rows.stop] = 0
        return found

    check_named(report_with(large_vocabulary, "logits", function), "logits")


# ---------------------------------------------------------------- what is right passes


def test_every_bound_operation_is_probed(path, gemma_path):
    """Each of the table is perturbed above; none may be added unchecked."""
    for found, operations in ((path, OPERATIONS), (gemma_path, GEMMA_OPERATIONS)):
        group = ComputeGroup.open(found).form()
        bound = set(group.ranks[0].session._formation._kernels.choices)
        assert bound == {*operations, "write_kv"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_right_kernels_pass(large_vocabulary, gemma_path, dtype, ranks):
    for path in (large_vocabulary, gemma_path):
        group = ComputeGroup.open(path, ranks, dtype=dtype).form()
        assert all(isinstance(rank.last, Ready) for rank in group.ranks)


@pytest.mark.parametrize("name", ["sim:ideal", "sim:adversarial"])
@pytest.mark.parametrize("windows", [False, True])
def test_a_simulated_chip_passes(path, gemma_path, name, windows):
    """Its kernels share no code with the reference, and its work is done late."""
    model_path = gemma_path if windows else path
    backend = find_backend(name)
    backend_config = BackendConfig(chip_indices=(0,), dtype="float32")
    backend.on_init(backend_config)
    config = WorkerConfig("chip0", "", model_path, dtype="float32", kv_blocks=16)
    reports = []
    runtime = open_runtime(backend, backend_config)
    session = Session(config, backend, runtime, ShardLoader(model_path), reports.append)
    session.handle(form_command())
    session.close()
    assert isinstance(reports[-1], Ready), reports[-1]


def test_probe_and_warm_up_take_blocks_of_the_pool_and_leave_them_idle(path, monkeypatch):
    bound = []
    right = PagedMemoryPool.bind

    def bind(pool, rows):
        blocks = {block for table in rows.block_tables for block in table}
        bound.append(blocks)
        assert all(pool.references(block) == 1 for block in blocks)
        return right(pool, rows)

    monkeypatch.setattr(PagedMemoryPool, "bind", bind)
    rank = open_rank(path, kv_blocks=24)
    rank.session.handle(form_command())
    assert isinstance(rank.last, Ready), rank.last
    assert 23 in set().union(*bound), "the last block is probed"
    pool = rank.session._formation._pool
    assert (pool.referenced_count, pool.free_count) == (0, 24)
    rank.session.close()


@pytest.mark.parametrize("kv_blocks", [1, 2, 5])
@pytest.mark.parametrize(
    "form",
    [
        {"context_tokens": 2},
        {"block_tokens": 1},
        {"slots": 1, "chunk_tokens": 1},
        {"vocabulary_tokens": 3},
    ],
    ids=str,
)
def test_the_smallest_pools_and_contexts_pass(path, kv_blocks, form):
    check_ready(path, kv_blocks, form)


@pytest.mark.parametrize(
    ("kv_blocks", "form"),
    [(1, {}), (8, {"block_tokens": 1}), (20, {"context_tokens": 15}), (20, {"slots": 1})],
    ids=str,
)
def test_small_pools_and_contexts_pass_with_windows(gemma_path, kv_blocks, form):
    check_ready(gemma_path, kv_blocks, form)


def check_ready(model_path, kv_blocks, form):
    rank = open_rank(model_path, kv_blocks=kv_blocks)
    rank.session.handle(form_command(**form))
    rank.session.close()
    assert isinstance(rank.last, Ready), rank.last


@pytest.mark.parametrize("great", [1, 2, 7])
def test_a_token_whose_weights_rule_it_out_is_no_mistake(path, great):
    rank = open_rank(path)
    rank.session.handle(form_command())
    # What is loaded stays for the next epoch of the same shard.
    head, device = rank.session._loader.loaded.weights.head, rank.session._device
    row = device.read_rows(head, [5])
    row[:, :great] = -3e38
    device.write_rows(head, 5, row)
    rank.session.handle(form_command(epoch=2))
    rank.session.close()
    assert isinstance(rank.last, Ready), rank.last
