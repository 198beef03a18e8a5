"""Intake's parts around the tiny model, without servers: what unit tests of intake stand on."""

import random
from collections.abc import Callable
from datetime import datetime
from types import SimpleNamespace

from control_plane.config import ControlPlaneConfig
from control_plane.intake.admission import Admission
from control_plane.intake.byte_budget import ByteBudget
from control_plane.intake.chat_template import ChatTemplate
from control_plane.intake.generation import IntakeParts
from control_plane.intake.generation_input import GenerationInput, TextPrompt
from control_plane.intake.model_card import ModelCard
from control_plane.intake.model_files import ModelFiles
from control_plane.intake.tokenizer import Tokenizer
from control_plane.intake.tokenizer_pool import TokenizerPool
from control_plane.metrics import Metrics
from control_plane.scheduling.messages import Event


class RecordingMetrics(Metrics):
    """Remembers what it was told, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def of(self, name: str) -> list[tuple[object, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    @property
    def in_progress(self) -> int:
        return len(self.of("request_received")) - len(self.of("request_finished"))

    def request_received(self, protocol: str) -> None:
        self.calls.append(("request_received", protocol))

    def request_finished(self, reason: str, duration_s: float) -> None:
        self.calls.append(("request_finished", reason, duration_s))

    def queue_time(self, seconds: float) -> None:
        self.calls.append(("queue_time", seconds))

    def first_token(self, seconds: float) -> None:
        self.calls.append(("first_token", seconds))

    def inter_token(self, seconds: float, count: int) -> None:
        self.calls.append(("inter_token", seconds, count))

    def prompt_tokens(self, count: int, cached_count: int) -> None:
        self.calls.append(("prompt_tokens", count, cached_count))

    def generation_tokens(self, count: int) -> None:
        self.calls.append(("generation_tokens", count))


class WatchedBudget(ByteBudget):
    """Tells how much is held."""

    pieces_count = 0

    def take(self, bytes_count: int) -> None:
        super().take(bytes_count)
        self.pieces_count += 1

    def release(self, bytes_count: int) -> None:
        super().release(bytes_count)
        self.pieces_count -= 1


def wanting(*prompts, **fields) -> GenerationInput:
    return GenerationInput(prompts or (TextPrompt("hi"),), **fields)


def tiny_intake(
    model: ModelFiles,
    post: Callable[[Event], None] = lambda _: None,
    *,
    pieces_max: int = 1000,
    threads_count: int = 1,
    **settings,
) -> SimpleNamespace:
    """parts, with pool and budget of their own and a clock that stands at `now`; close the pool."""
    config = ControlPlaneConfig(model_path=str(model.path), **settings)
    tokenizer = Tokenizer(model.tokenizer, "tiny")
    card = ModelCard.of(model, "mine", None, tokenizer.size)
    budget = WatchedBudget(bytes_max=config.intake_bytes_max, pieces_max=pieces_max)
    pool = TokenizerPool(
        tokenizer,
        ChatTemplate(model.chat_template, {}, datetime.now),
        threads_count,
        budget=budget,
        context_tokens=card.context_tokens,
    )
    made = SimpleNamespace(now=100.0, card=card, pool=pool, budget=budget)
    made.admission = Admission(config, card, tokenizer, pool, random.Random(3))
    made.metrics = RecordingMetrics()
    made.parts = IntakeParts(made.admission, tokenizer, post, made.metrics, lambda: made.now)
    return made
