"""What a submitted request may be: refused with the field, the limit and the remedy, or bounded."""

from control_plane.errors import InvalidRequest, RequestError
from control_plane.request import Request
from control_plane.scheduling.chip_load_table import GroupLoad


def tokens_limit(
    request: Request, context_tokens: int, groups: list[GroupLoad]
) -> int | RequestError:
    """Most output tokens of a request on the groups it may use, or why it cannot be served."""
    prompt_count = len(request.prompt_ids)
    if not prompt_count:
        return InvalidRequest("prompt is empty; it must have at least one token", field="prompt")
    if prompt_count >= context_tokens:
        return InvalidRequest(
            f"prompt has {prompt_count} tokens; the context holds {context_tokens} with at least "
            f"one of output: shorten the prompt to {context_tokens - 1} tokens or fewer",
            field="prompt",
        )
    memory_tokens = max(load.total_blocks * load.block_tokens for load in groups)
    if prompt_count >= memory_tokens:
        return InvalidRequest(
            f"prompt has {prompt_count} tokens; the memory of the largest group holds "
            f"{memory_tokens} with at least one of output: shorten the prompt to "
            f"{max(memory_tokens - 1, 0)} tokens or fewer, or serve with more blocks",
            field="prompt",
        )
    limit = min(context_tokens, memory_tokens) - prompt_count
    if request.max_tokens is not None:
        refusal = _refused_max_tokens(request.max_tokens, limit, prompt_count)
        if refusal:
            return refusal
        limit = request.max_tokens
    if len(request.output_ids) >= limit:
        return InvalidRequest(
            f"output_ids has {len(request.output_ids)} tokens; the answer is at most {limit}: "
            f"nothing is left to generate",
            field="output_ids",
        )
    return limit


def _refused_max_tokens(max_tokens: int, limit: int, prompt_count: int) -> RequestError | None:
    if max_tokens < 1:
        return InvalidRequest(
            f"max_tokens is {max_tokens}; it must be at least 1", field="max_tokens"
        )
    if max_tokens > limit:
        return InvalidRequest(
            f"max_tokens is {max_tokens}; with a prompt of {prompt_count} tokens context and "
            f"memory allow {limit}: ask for {limit} or fewer, or leave max_tokens out",
            field="max_tokens",
        )
    return None
