"""Clients that read streamed answers and look at nothing, in a process of their own.

python -m scripts.control_cost.reading_clients PROTOCOL PORT STREAMS TOKENS   prints how many events
came in all: chunks of HTTP, messages of gRPC.
"""

import asyncio
import json
import sys

import grpc

from scripts.client_wire import ResumableAnswer
from scripts.generation import Generation

HOST = "127.0.0.1"
PROMPT_IDS = (1, 2, 3, 4)
METHOD = "/polychip.v1.InferenceService/Generate"
EVENT_END = b"\n\n"
READ_BYTES = 1 << 16


async def read_http(port: int, tokens: int) -> int:
    """Chunks of one answer, without the end mark."""
    content = {"prompt": PROMPT_IDS, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(content).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(head.encode() + body)
    ends_count, tail = 0, b""
    while part := await reader.read(READ_BYTES):
        ends_count += (tail + part).count(EVENT_END)
        tail = part[-1:] if part[-2:] != EVENT_END else b""
    writer.close()
    await writer.wait_closed()
    return ends_count - 1


async def read_grpc(channel: grpc.aio.Channel, tokens: int) -> int:
    """Messages of one answer."""
    generation = Generation(PROMPT_IDS, max_tokens=tokens, ignore_eos=True)
    request = ResumableAnswer(generation).next_request().SerializeToString()
    ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(METHOD)
    return sum([1 async for _ in ask(request)])


async def read_all(protocol: str, port: int, streams: int, tokens: int) -> int:
    """Events of so many answers at once."""
    if protocol == "http":
        return sum(await asyncio.gather(*(read_http(port, tokens) for _ in range(streams))))
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        return sum(await asyncio.gather(*(read_grpc(channel, tokens) for _ in range(streams))))


if __name__ == "__main__":
    print(asyncio.run(read_all(sys.argv[1], *map(int, sys.argv[2:]))))
