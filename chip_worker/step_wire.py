"""Conversion of a step, the one frequent message to a worker, to its record.

Columns of equal length stand side by side in the message; here they become rows.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from chip_worker.batch import Admission, RowWants, SlotSampling, Step, StepRow
from chip_worker.errors import WorkerError
from protos import worker_pb2

_OPTIONAL_SAMPLING: tuple[
    Literal[
        "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
    ],
    ...,
] = ("top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class MalformedMessage(WorkerError):
    """A message of the control plane has not the shape the protocol gives it."""


def decode_step(step: worker_pb2.Step, received_ns: int, kv_groups_count: int) -> Step:
    """The step a message means, of a model with so many KV groups. Raises MalformedMessage."""
    _check_columns("extension", step.extension_slot, step.extension_count)
    _check_columns("drop", step.drop_slot, step.drop_kv_group)
    _check_columns("drop", step.drop_slot, step.drop_count)
    _check_columns("block", step.block_slot, step.block_id)
    block_kv_groups = _kv_group_column(step.block_id, step.block_kv_group)
    _check_columns("row", step.row_slot, step.row_tokens)
    if sum(step.extension_count) != len(step.extension_ids):
        raise MalformedMessage(
            f"extensions name {sum(step.extension_count)} ids, {len(step.extension_ids)} came"
        )
    sampled = set(step.sampled_row)
    if len(sampled) != len(step.sampled_row) or max(sampled, default=-1) >= len(step.row_slot):
        raise MalformedMessage(f"sampled rows {list(step.sampled_row)} do not fit the rows")
    return Step(
        term=step.term,
        epoch=step.group_epoch,
        step_id=step.step_id,
        releases=tuple(step.release_slot),
        admissions=tuple(
            _decode_admission(admission, kv_groups_count) for admission in step.admissions
        ),
        extensions=_decode_extensions(step),
        drops=tuple(zip(step.drop_slot, step.drop_kv_group, step.drop_count, strict=True)),
        new_blocks=tuple(zip(step.block_slot, block_kv_groups, step.block_id, strict=True)),
        rows=tuple(
            StepRow(slot=slot, tokens_count=tokens_count, sampled=index in sampled)
            for index, (slot, tokens_count) in enumerate(
                zip(step.row_slot, step.row_tokens, strict=True)
            )
        ),
        digest=step.state_digest if step.HasField("state_digest") else None,
        received_ns=received_ns,
    )


def _decode_extensions(step: worker_pb2.Step) -> tuple[tuple[int, tuple[int, ...]], ...]:
    extensions = []
    start = 0
    for slot, count in zip(step.extension_slot, step.extension_count, strict=True):
        extensions.append((slot, tuple(step.extension_ids[start : start + count])))
        start += count
    return tuple(extensions)


def _decode_admission(admission: worker_pb2.Admission, kv_groups_count: int) -> Admission:
    return Admission(
        slot=admission.slot,
        token_ids=tuple(admission.token_ids),
        output_start=admission.output_start,
        cached_count=admission.cached_count,
        block_tables=_decode_tables(admission, kv_groups_count),
        sampling=_decode_sampling(admission.sampling),
        wants=_decode_wants(admission.wants),
        adapter=admission.adapter,
    )


def _decode_tables(
    admission: worker_pb2.Admission, kv_groups_count: int
) -> tuple[tuple[int, ...], ...]:
    """One table for each KV group; their blocks stand one group after the other."""
    kv_groups = _kv_group_column(admission.block_ids, admission.block_kv_group)
    if any(later < earlier for earlier, later in pairwise(kv_groups)):
        raise MalformedMessage(
            f"admission to slot {admission.slot}: block_kv_group {list(kv_groups)} is not ascending"
        )
    if kv_groups and kv_groups[-1] >= kv_groups_count:
        raise MalformedMessage(
            f"admission to slot {admission.slot} names KV group {kv_groups[-1]}; the model has "
            f"{kv_groups_count}"
        )
    tables: list[list[int]] = [[] for _ in range(kv_groups_count)]
    for kv_group, block_id in zip(kv_groups, admission.block_ids, strict=True):
        tables[kv_group].append(block_id)
    return tuple(map(tuple, tables))


def _kv_group_column(block_ids: Sequence[int], kv_groups: Sequence[int]) -> Sequence[int]:
    """The KV group of each block: group 0 where the column is left out."""
    if not kv_groups:
        return [0] * len(block_ids)
    _check_columns("block_kv_group", kv_groups, block_ids)
    return kv_groups


def _decode_sampling(sampling: worker_pb2.SlotSampling) -> SlotSampling:
    """What is absent has the default of the record."""
    _check_columns("bias", sampling.bias_token_id, sampling.bias)
    optional = {
        name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING if sampling.HasField(name)
    }
    return SlotSampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        choice=sampling.choice,
        logit_bias=tuple(zip(sampling.bias_token_id, sampling.bias, strict=True)),
        suppressed_ids=tuple(sampling.suppressed_token_ids),
        min_tokens=sampling.min_tokens,
        **optional,
    )


def _decode_wants(wants: worker_pb2.RowWants) -> RowWants:
    return RowWants(
        logprobs=wants.logprob,
        top_tokens=wants.top_tokens,
        prompt_top_tokens=wants.prompt_top_tokens if wants.prompt_logprobs else None,
        logits=wants.logits,
    )


def _check_columns(name: str, slots: Sequence[int], values: Sequence[float]) -> None:
    if len(slots) != len(values):
        raise MalformedMessage(f"{name} columns have {len(slots)} and {len(values)} entries")
