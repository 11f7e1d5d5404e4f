"""The settings of the log."""

from __future__ import annotations

from enum import Enum

from gateway.config.units import Section, setting


class LogFormat(Enum):
    """How log lines are written."""

    JSON = "json"
    TEXT = "text"


class LogLevel(Enum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogConfig(Section):
    """What is logged about requests and events. Prompt text and keys are never logged."""

    access: bool = setting(True, "One line per request on standard output.")
    format: LogFormat = setting("json", "Format of all lines except the access log: json or text.")
    level: LogLevel = setting("info", "Lowest level that is logged: debug, info, warning or error.")
