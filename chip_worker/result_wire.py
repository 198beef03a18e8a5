"""The result of a step as columns of protos/worker.proto; part of `wire`."""

import math
from collections.abc import Sequence

from chip_worker.batch import PromptScores, RowResult, StepResult, StepTimes, TopTokens
from protos import worker_pb2


def encode_result(result: StepResult) -> worker_pb2.StepResult:
    """Columns that no row needs stay empty: log-probabilities, tops, status, logits, scores."""
    rows = result.rows
    message = worker_pb2.StepResult(
        term=result.term,
        group_epoch=result.epoch,
        step_id=result.step_id,
        token_count=[len(row.token_ids) for row in rows],
        token_ids=[token_id for row in rows for token_id in row.token_ids],
        times=encode_times(result.times),
    )
    if any(row.logprobs for row in rows):
        message.logprobs.extend(value for row in rows for value in _padded_logprobs(row))
    if not all(row.finite for row in rows):
        message.status.extend(
            worker_pb2.ROW_STATUS_OK if row.finite else worker_pb2.ROW_STATUS_NOT_FINITE
            for row in rows
        )
    if any(row.logits is not None for row in rows):
        message.logits.extend(row.logits or b"" for row in rows)
    if any(row.tops for row in rows):
        message.top_count.extend(count for row in rows for count in _top_counts(row))
        tops = [top for row in rows for top in row.tops]
        message.top_ids.extend(_joined_ids(tops))
        message.top_logprobs.extend(_joined_logprobs(tops))
    if result.prompt_scores:
        _add_prompt_scores(message, result.prompt_scores)
    return message


def _add_prompt_scores(message: worker_pb2.StepResult, scores: Sequence[PromptScores]) -> None:
    message.prompt_logprob_count.extend(len(row.logprobs) for row in scores)
    message.prompt_logprobs.extend(value for row in scores for value in row.logprobs)
    if any(row.tops for row in scores):
        message.prompt_top_count.extend(
            len(row.tops[0].token_ids) if row.tops else 0 for row in scores
        )
        tops = [top for row in scores for top in row.tops]
        message.prompt_top_ids.extend(_joined_ids(tops))
        message.prompt_top_logprobs.extend(_joined_logprobs(tops))


def _top_counts(row: RowResult) -> Sequence[int]:
    return [len(top.token_ids) for top in row.tops] or (0,) * len(row.token_ids)


def _joined_ids(tops: Sequence[TopTokens]) -> list[int]:
    return [token_id for top in tops for token_id in top.token_ids]


def _joined_logprobs(tops: Sequence[TopTokens]) -> list[float]:
    return [logprob for top in tops for logprob in top.logprobs]


def _padded_logprobs(row: RowResult) -> Sequence[float]:
    return row.logprobs or (math.nan,) * len(row.token_ids)


def encode_times(times: StepTimes) -> worker_pb2.StepTimes:
    """Where a step's time went, for a result of rank 0 and for the other ranks' acks; in ns."""
    return worker_pb2.StepTimes(
        step_id=times.step_id,
        queue_ns=times.queue_ns,
        device_ns=times.device_ns,
        communication_ns=times.communication_ns,
        gap_ns=times.gap_ns,
    )
