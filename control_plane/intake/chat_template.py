"""Renders a conversation with the model's own template, as transformers does, in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from control_plane.errors import ConfigurationError, InvalidRequest


class TemplateRefusalError(Exception):
    """The template called raise_exception."""


class GenerationBlock(Extension):
    """Lets templates mark the assistant's part with {% generation %}; the mark changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - a set is what jinja2 declares

    def parse(self, parser: Parser) -> Node:  # type: ignore[explicit-override]
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """A compiled template; `render` may be called from any thread.

    source: None if the model has no template. special_tokens: names the template may use. now: the
    local time, for templates that print the date.
    """

    def __init__(
        self, source: str | None, special_tokens: Mapping[str, str], now: Callable[[], datetime]
    ) -> None:
        """Raises ConfigurationError if the template is not valid Jinja."""
        self._special_tokens = dict(special_tokens)
        self._template: jinja2.Template | None = None
        if source is None:
            return
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The prompt text, ending where the assistant is to speak. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                "messages: this model has no chat template; send the whole text as `prompt` to "
                "/v1/completions (gRPC: GenerateRequest.prompt)",
                field="messages",
            )
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        # A template is a program of the model's: whatever it raises, the messages did not suit it.
        except Exception as error:
            raise InvalidRequest(
                f"messages: the model's chat template refuses them: {str(error)[:200]}",
                field="messages",
            ) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateRefusalError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """Unlike jinja2's own filter: no HTML escapes, as in transformers."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
