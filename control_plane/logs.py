"""Logging of the control plane: structlog for our own lines, the same renderer for libraries.

An event is a constant name (`worker.attached`), its values are fields. Prompts and tokens are never
logged. Lines go to standard error: coloured on a terminal, JSON elsewhere.
"""

import logging
import sys

import structlog


def configure_logging(level: str, json_lines: bool | None = None) -> None:
    """Sets the process up. json_lines None: JSON unless standard error is a terminal."""
    if json_lines is None:
        json_lines = not sys.stderr.isatty()
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if json_lines:
        shared.append(structlog.processors.format_exc_info)
    renderer: structlog.typing.Processor = structlog.processors.JSONRenderer()
    if not json_lines:
        # The default shows the variables of every frame, and those hold prompts and tokens.
        plain = structlog.dev.plain_traceback
        renderer = structlog.dev.ConsoleRenderer(exception_formatter=plain)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
