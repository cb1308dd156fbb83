"""Owns how a Tokenizer is read from a Hugging Face directory.

Invariants: tokenizer.json decides where it exists and transformers is then never imported; whatever names an end of
sequence (generation_config, config, tokenizer_config) counts.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixrt.errors import ModelError, shown
from radixrt.model.checkpoint import read_json
from radixrt.model.tokenizer import Kind, Tokenizer, library_errors, template_source

if TYPE_CHECKING:
    import tokenizers

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_directory(
    directory: Path,
    chat_template: str | None = None,
    *,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and what else a model directory has to say about tokens.

    Raises:
        ModelError: no tokenizer, or one that cannot be read.
    """
    settings = _optional(directory / "tokenizer_config.json")
    config = _optional(directory / "config.json") if config is None else config
    if generation_config is None:
        generation_config = _optional(directory / "generation_config.json")
    backend = _backend(directory)
    backend.no_truncation()
    backend.no_padding()
    _add_missing(backend, settings, directory)
    named = _named_tokens(settings, _optional(directory / "special_tokens_map.json"))
    bos_id = _id(backend, named.get("bos_token"))
    with library_errors(lambda reason: ModelError(f"{directory}: its tokenizer does not work ({reason})")):
        first = backend.encode("", add_special_tokens=True).ids[:1]
    adds_bos = settings.get("add_bos_token")
    if adds_bos is not None and not isinstance(adds_bos, bool):
        path = directory / "tokenizer_config.json"
        raise ModelError(f"{path}: add_bos_token={shown(adds_bos)}: must be true or false")
    if bos_id is None and first and adds_bos is not False:
        bos_id = first[0]
    if not isinstance(adds_bos, bool):
        adds_bos = bool(first) and first[0] == bos_id
    eos_ids, vocab = set(), _vocabulary(backend, config)
    for source, values in (("generation_config.json", generation_config), ("config.json", config)):
        eos_ids |= _eos_ids(directory / source, values.get("eos_token_id"), vocab)
    eos = _id(backend, named.get("eos_token"))
    if eos is not None:
        eos_ids |= _eos_ids(directory / "tokenizer_config.json", eos, vocab)
    kind, strips_space = _decoder_kind(backend)
    templates = (
        _templates(directory, settings) if chat_template is None else {"default": template_source(chat_template)}
    )
    return Tokenizer(
        backend,
        name=directory.resolve().name,
        kind=kind,
        bos_id=bos_id,
        adds_bos=adds_bos,
        eos_ids=eos_ids,
        strips_space=strips_space,
        templates=templates,
        template_tokens=named,
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(directory: Path) -> tokenizers.Tokenizer:
    import tokenizers

    path = directory / "tokenizer.json"
    if path.is_file():
        with library_errors(lambda reason: ModelError(f"{path}: not a tokenizer ({reason})")):
            return tokenizers.Tokenizer.from_buffer(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    if not any((directory / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise ModelError(f"{directory}: has no tokenizer.json (nor tokenizer.model, nor vocab.json)")
    what = f"{directory}: has no tokenizer.json and transformers cannot convert its tokenizer"
    with library_errors(lambda reason: ModelError(f"{what} ({reason})")):
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        backend: tokenizers.Tokenizer = slow.backend_tokenizer
        return backend


def _add_missing(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Tokens that only tokenizer_config.json's added_tokens_decoder knows."""
    listed = settings.get("added_tokens_decoder")
    if listed is None:
        return
    path = directory / "tokenizer_config.json"
    if not isinstance(listed, dict):
        raise ModelError(f"{path}: added_tokens_decoder={shown(listed)}: must be an object")
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    try:
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            if entry["content"] in known:
                continue
            flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in entry}
            special = bool(entry.get("special"))
            token = AddedToken(entry["content"], special=special, **flags)
            backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: added_tokens_decoder is malformed ({error!r})") from None


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for source in sources:
        for key in _NAMED:
            value = source.get(key)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str) and key not in named:
                named[key] = value
    return named


def _id(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    id: int | None = None if token is None else backend.token_to_id(token)
    return id


def _vocabulary(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> int:
    """How many ids the model can give: what its config says, or what the tokenizer knows where there is no model."""
    size = config.get("vocab_size")
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _eos_ids(path: Path, value: Any, vocab: int) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise ModelError(f"{path}: eos_token_id={shown(value)}: must be a token id or a list of token ids")
        if id >= vocab:
            raise ModelError(f"{path}: eos_token_id={shown(value)}: the vocabulary has ids 0 to {vocab - 1}")
    return set(ids)


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[Kind, bool]:
    """How pieces spell bytes, and whether decoding drops a leading space: both are in the decoder's description."""
    parts = _parts(backend.decoder, "decoders")
    types = {part.get("type") for part in parts}
    if "ByteLevel" in types:
        return "byte-level", False
    strips = any(part.get("type") == "Strip" and part.get("start") for part in parts) or any(
        part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts
    )
    if types & {"ByteFallback", "Metaspace", "Fuse", "Replace"}:
        return "sentencepiece", strips
    supported = "ByteLevel, Metaspace and SentencePiece-style sequences"
    raise ModelError(f"tokenizer.json: decoder {sorted(map(str, types))} is not supported; supported are {supported}")


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state.get("type") == "Sequence":
        return list(state.get(key, []))
    return [state]


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return {"default": template_source(str(path))}
    legacy, source = directory / "chat_template.json", directory / "tokenizer_config.json"
    value = settings.get("chat_template")
    if value is None and legacy.is_file():
        value, source = read_json(legacy).get("chat_template"), legacy
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list):
        raise ModelError(f"{source}: chat_template={shown(value)}: must be a template or a list of named templates")
    named: dict[str, str] = {}
    for number, entry in enumerate(value):
        name, template = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelError(f"{source}: chat_template[{number}]={shown(entry)}: must have a name and a template")
        named[name] = template
    return named
