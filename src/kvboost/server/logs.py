"""Logs of the server: JSON lines for machines, plain lines for terminals. No prompt is in them."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Literal

LogStyle = Literal["auto", "json", "text"]
FIELDS = "kvboost_fields"  # attribute of a log record
UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(style: LogStyle = "auto", level: str = "INFO") -> None:
    """Send the logs of the whole process to standard error; "auto" is text on a terminal.

    Uvicorn must be started with `log_config=None`, or it would set up its own again.
    """
    if style == "auto":
        style = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in UVICORN:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True


def log_fields(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """Log a message with fields, which become keys of the JSON line."""
    logger.log(level, message, extra={FIELDS: fields})


class JsonLines(logging.Formatter):
    """An object in one line for each record."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in which text from outside cannot break the line."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """A line for people, without what is empty; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in which text from outside cannot break the line."""
        at = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        fields = getattr(record, FIELDS, {}).items()
        pairs = [f"{name}={_shown(value)}" for name, value in fields if value not in (None, "")]
        parts = [at, f"{record.levelname:<7}", _shown(record.getMessage()), *pairs]
        lines = [" ".join(parts)]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).splitlines()
            lines += [f"    {_shown(line)}" for line in traceback]
        return "\n".join(lines)


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else json.dumps(text)
