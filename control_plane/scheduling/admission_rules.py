"""What a request may be: refused with the field, the limit and the remedy, or bounded."""

from collections.abc import Iterable

from control_plane.config import SchedulingConfig
from control_plane.errors import InvalidRequest, QueueFull, RequestError, WorkerFailure
from control_plane.request import Request
from control_plane.scheduling.chip_load_table import GroupLoad
from control_plane.scheduling.live_request import LiveRequest


def tokens_limit(
    request: Request, context_tokens: int, groups: list[GroupLoad]
) -> int | RequestError:
    """Most output tokens of a request on the groups it may use, or why it cannot be served."""
    prompt_count = len(request.prompt_ids)
    assert prompt_count, "intake admits no empty prompt"
    assert request.max_tokens is None or request.max_tokens >= 1, "a token is drawn in any case"
    room_tokens = min(context_tokens, max(load.tokens_max for load in groups))
    if prompt_count >= room_tokens:
        return InvalidRequest(
            f"prompt: {prompt_count} tokens leave no room for output in the {room_tokens} that "
            f"the largest group holds; send at most {max(room_tokens - 1, 0)}, or serve with "
            "more blocks",
            field="prompt",
        )
    limit = room_tokens - prompt_count
    if request.max_tokens is not None:
        if request.max_tokens > limit:
            return InvalidRequest(
                f"max_tokens: {prompt_count} prompt tokens and {request.max_tokens} output tokens "
                f"exceed the {room_tokens} that the largest group holds; send at most {limit} or a "
                "shorter prompt, or leave it out",
                field="max_tokens",
            )
        limit = request.max_tokens
    if len(request.output_ids) > limit:
        return InvalidRequest(
            f"resume_output_ids: {len(request.output_ids)} tokens are more than the {limit} this "
            f"answer may have; send those that were received",
            field="resume_output_ids",
        )
    return limit


def queue_refusal(
    request: Request, waiting_count: int, loads: Iterable[GroupLoad], config: SchedulingConfig
) -> RequestError | None:
    """Why the request cannot wait: the queue is full in requests or in tokens. None if it can."""
    loads = list(loads)
    tokens_count = sum(load.queued_tokens for load in loads)
    more = len(request.prompt_ids) + len(request.output_ids)
    if waiting_count >= config.queue_requests_max:
        full = f"{waiting_count} requests wait"
        limit = f"the queue holds {config.queue_requests_max}"
    elif tokens_count + more > config.queue_tokens_max:
        full = f"{tokens_count} tokens wait to be computed and this request has {more}"
        limit = f"the queue holds {config.queue_tokens_max} tokens"
    else:
        return None
    rate = sum(load.speed.tokens_per_s for load in loads)
    retry_after_s = min(60.0, max(1.0, tokens_count / rate))
    message = f"{full}; {limit}: try again in {retry_after_s:.0f} s"
    return QueueFull(message, retry_after_s=retry_after_s)


def outgrown(live: LiveRequest, memory_tokens: int) -> RequestError:
    """Why an accepted request ends when the groups that serve now hold only `memory_tokens`."""
    output_tokens = memory_tokens - live.prompt_count
    remedy = f"max_tokens of at most {output_tokens}" if output_tokens > 0 else "a shorter prompt"
    return WorkerFailure(
        f"the request may grow to {live.computed_max} tokens, but the group that served it came "
        f"back with less memory, and the largest one holds {memory_tokens}: send it again with "
        f"{remedy}"
    )
