"""Which format a model writes: read off its chat template, or named by the operator (in the words of vLLM and SGLang too)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from radixrt.errors import InvalidRequest, nearest
from radixrt.tools.formats import HERMES, JSON, LLAMA, MISTRAL, MISTRAL_ARGS, PYTHONIC, TOOL_FORMATS, ToolFormat
from radixrt.tools.reasoning import REASONING_FORMATS, ReasoningFormat

# Names that other servers have for these formats.
TOOL_ALIASES: dict[str, str] = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "llama4": "pythonic",
    "mistral_v11": "mistral_args",
    "generic": "json",
}
REASONING_ALIASES: dict[str, str] = {
    "qwen3": "think",
    "qwen3-thinking": "think",
    "deepseek_r1": "think",
    "deepseek-r1": "think",
    "deepseek_v3": "think",
    "glm45": "think",
    "olmo3": "think",
    "ernie45": "think",
    "holo2": "think",
    "seed_oss": "seed",
    "cohere_command3": "cohere",
}
# XML inside <tool_call>, and other ways that have no format here: the tools are described in our own words.
_OTHER = re.compile(r"<function=|<arg_key>|<parameter=|<function_calls>|<\|tool▁calls▁begin\|>")
_PYTHON = re.compile(r"\[\s*func(?:tion)?_name\d*\(")


def choose_tool_format(
    template: str | None,
    special_tokens: Sequence[str] = (),
    override: str | None = None,
    field: str = "tool_call_parser",
) -> ToolFormat | None:
    """The format of a model with this chat template.

    Args:
        special_tokens: texts of the tokenizer's special tokens, for templates that write the markers' parts.
        override: a name of ``TOOL_FORMATS``, one of ``TOOL_ALIASES``, ``"auto"``, or ``"none"``: no calls, ``None``.

    Raises:
        InvalidRequest: an unknown name, under ``field``.
    """
    if override == "none":
        return None
    if override is not None and override != "auto":
        name = TOOL_ALIASES.get(override, override)
        if name not in TOOL_FORMATS:
            raise InvalidRequest(
                field, f"={override!r}{nearest(override, ('auto', 'none', *TOOL_FORMATS, *TOOL_ALIASES))}"
            )
        return TOOL_FORMATS[name]
    if template is None or not knows_tools(template) or _OTHER.search(template):
        return JSON
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if _PYTHON.search(template):
        return PYTHONIC
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters": ' in template):
        return LLAMA
    return JSON


def choose_reasoning_format(
    template: str | None,
    special_tokens: Sequence[str] = (),
    override: str | None = None,
    field: str = "reasoning_parser",
) -> ReasoningFormat | None:
    """How a model with this chat template marks its thinking; ``None``: it does not, or ``override`` is ``"none"``.

    Raises:
        InvalidRequest: an unknown name, under ``field``.
    """
    if override == "none":
        return None
    if override is not None and override != "auto":
        name = REASONING_ALIASES.get(override, override)
        if name not in REASONING_FORMATS:
            valid = ("auto", "none", *REASONING_FORMATS, *REASONING_ALIASES)
            raise InvalidRequest(field, f"={override!r}{nearest(override, valid)}")
        return REASONING_FORMATS[name]
    for item in REASONING_FORMATS.values():
        if item.end in special_tokens or (template is not None and item.end in template):
            return item
    return None


def knows_tools(template: str | None) -> bool:
    """Whether a chat template has a place for tools."""
    return (
        template is not None
        and re.search(r"\btools\b", re.sub(r"\{#.*?#\}", "", template, flags=re.DOTALL)) is not None
    )
