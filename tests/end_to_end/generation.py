"""Runs generations over gRPC and gathers what came back, for the end-to-end tests."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from protos import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEADLINE_S = 300.0


@dataclass
class Generation:
    """One finished answer: ids, log-probabilities, text, the first index of each piece, usage."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    finish: int = 0
    usage: inference_pb2.Usage | None = None


def request_of(
    prompt: Sequence[int] | str,
    tokens: int,
    *,
    temperature: float = 0.0,
    ignore_eos: bool = True,
    stop_ids: Sequence[int] = (),
    seed: int | None = None,
) -> inference_pb2.GenerateRequest:
    """A request; the prompt is token ids, or the text of a user's chat message."""
    sampling = inference_pb2.SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=stop_ids,
        logprobs=True,
    )
    if seed is not None:
        sampling.seed = seed
    request = inference_pb2.GenerateRequest(sampling=sampling)
    if isinstance(prompt, str):
        request.chat.messages.add(role="user", content=prompt)
    else:
        request.prompt_ids.ids.extend(prompt)
    return request


class Client:
    """A gRPC client of one cluster."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(
            address, options=[("grpc.max_receive_message_length", 64 << 20)]
        )
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        started: threading.Event | None = None,
    ) -> Generation:
        """Runs one request to its end; fails on a repeated or skipped index."""
        result = Generation()
        for piece in self.inference.Generate(request, timeout=DEADLINE_S):
            if piece.token_ids:
                assert piece.first_index == len(result.ids), "an index was repeated or skipped"
                result.ids.extend(piece.token_ids)
                result.logprobs.extend(piece.logprobs)
                if started is not None:
                    started.set()
            result.prompt_ids.extend(piece.prompt_ids)
            result.text += piece.text
            if piece.HasField("usage"):
                result.usage = piece.usage
                result.finish = piece.finish_reason
        assert result.usage is not None, "the stream ended without usage"
        assert result.usage.completion_tokens == len(result.ids)
        return result

    def generate_all(self, requests: Sequence[inference_pb2.GenerateRequest]) -> list[Generation]:
        """Runs requests at the same time; results in their order."""
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.generate, requests))

    def flush(self) -> int:
        """Flushes the prefix cache; returns the blocks freed."""
        return int(self.admin.FlushCache(admin_pb2.FlushCacheRequest(), timeout=30).blocks_freed)

    def status(self) -> admin_pb2.GetStatusResponse:
        return self.admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=30)

    def wait_until_serving(self, deadline_s: float) -> None:
        """Returns once every group serves; the service itself is healthy with the first."""
        deadline = time.monotonic() + deadline_s
        while any(group.state != "serving" for group in self.status().groups):
            assert time.monotonic() < deadline, f"not all groups serve:\n{self.status()}"
            time.sleep(0.1)

    def logits(self, ids: Sequence[int], group: str) -> list[float]:
        """Logits of the position after `ids`, computed by one group."""
        answer = self.admin.DebugLogits(
            admin_pb2.DebugLogitsRequest(token_ids=ids, group=group), timeout=DEADLINE_S
        )
        assert answer.group == group
        return list(answer.logits)
