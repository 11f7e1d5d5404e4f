"""What a model's folder says of its tokenizer: its settings, its special tokens, its chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import jinja2

from gateway.core.errors import ConfigError
from gateway.counting.messages import Json
from gateway.counting.templates import ChatTemplate

# Architectures whose chats vLLM 0.32 renders in code, without a Jinja template.
_OWN_RENDERER: Final = (
    *("DeepseekV32", "DeepseekV4"),
    *("GptOss", "KimiK3", "MoonshotKimia", "Inkling"),
)
_NAMED_TOKENS: Final = tuple(
    f"{each}_token" for each in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def settings(path: Path) -> Json:
    """Read a JSON file of the folder; empty when there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path}: error: {error}"]) from error
    return value if isinstance(value, dict) else {}


def special_tokens(folder: Path, config: Json) -> dict[str, str]:
    """Return the named special tokens: templates write them."""
    found = {}
    older = settings(folder / "special_tokens_map.json")
    for name in _NAMED_TOKENS:
        token = config.get(name, older.get(name))
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def templates(folder: Path, config: Json, special: Mapping[str, str]) -> dict[str, ChatTemplate]:
    """Return the chat templates by name; those in files win, none for a model rendered in code."""
    architectures = settings(folder / "config.json").get("architectures") or []
    if any(str(each).startswith(_OWN_RENDERER) for each in architectures):
        return {}
    sources: dict[str, str] = {}
    in_config = config.get("chat_template")
    if in_config is None:
        in_config = settings(folder / "chat_template.json").get("chat_template")
    try:
        if isinstance(in_config, str):
            sources["default"] = in_config
        elif isinstance(in_config, list):
            sources = {each["name"]: each["template"] for each in in_config}
        files = sorted(folder.glob("additional_chat_templates/*.jinja"))
        if (folder / "chat_template.jinja").exists():
            sources = {"default": (folder / "chat_template.jinja").read_text("utf-8")}
            sources |= {file.stem: file.read_text("utf-8") for file in files}
        sources |= _beside_tools(folder, sources)
        return {name: ChatTemplate(source, special) for name, source in sources.items()}
    except (jinja2.TemplateError, LookupError, TypeError, ValueError, OSError) as error:
        raise ConfigError([f"{folder}: error: its chat template is wrong: {error}"]) from error


def _beside_tools(folder: Path, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the templates that change where the model has a processor: it renders the chats without tools.

    As in vLLM (0.32, renderers/hf.py) and transformers 5: of its own sources the older ones win.
    """
    processor = settings(folder / "processor_config.json")
    if not processor and not (folder / "preprocessor_config.json").exists():
        return {}
    older = settings(folder / "chat_template.json")
    own = processor.get("chat_template") or older.get("chat_template")
    if not isinstance(own, str):
        return {}
    with_tools = sources.get("tool_use", sources.get("default"))
    return {"default": own} | ({} if with_tools is None else {"tool_use": with_tools})
