"""The model card: all that a service without weights must know of the model it serves.

The fingerprint goes into the block keys' namespace, so two services reuse each other's KV only if it is equal. For a
checkpoint it covers ``config.json``, the headers of the safetensors files (names, types, shapes, offsets) and their
sizes, not the gigabytes behind them. A fine-tune differs from its base in none of these, so a few bytes of every tensor
are hashed too: loading a card reads about a kilobyte per tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from pinyon.core.errors import InvalidArgument, NotFound
from pinyon.model.builtin import BUILTIN_RECIPE, BUILTIN_SEED, builtin_config
from pinyon.model.chat_template import ByteChatTemplate, ChatTemplate, JinjaChatTemplate
from pinyon.model.config import ModelConfig
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from pinyon.model.tokenizer_files import named_tokens, tokenizer_class, tokenizer_rules

BUILTIN_NAME = "pinyon-tiny"

JSON_BYTES_MAX = 256 << 20
HEADER_BYTES_MAX = 100 << 20
FILES_MAX = 4_096
# The beginning, middle and end of each tensor are hashed: merging even a small adapter into a matrix changes all of its
# values.
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ModelCard:
    """A model's identity and text tools. ``path`` is None for the built-in model. ``fingerprint`` is 32 hex digits.

    ``own_chat_template`` is True if the checkpoint has a template. Otherwise conversations are written as plain lines,
    on which no model was trained.
    """

    name: str
    config: ModelConfig
    fingerprint: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    path: Path | None = None
    own_chat_template: bool = True


def load_card(
    model: str | None = None, name: str | None = None, strftime_now: Callable[[str], str] | None = None
) -> ModelCard:
    """Returns the card of a checkpoint folder, or of the built-in model when ``model`` is None.

    ``name`` is the name that clients use, by default the folder's. ``strftime_now`` tells chat templates the time.
    Reads no tensors. Raises :class:`NotFound` if there is no such folder, :class:`InvalidArgument` if a file in it is
    missing, malformed or unsupported.
    """
    if model is None:
        return _builtin_card(name or BUILTIN_NAME)
    folder = Path(model).absolute()
    if not folder.is_dir():
        raise NotFound(f"no model folder at {model}", field="model")
    config_bytes = _read(folder / "config.json")
    config_json = _json_object(folder / "config.json", config_bytes)
    generation = folder / "generation_config.json"
    config = ModelConfig.from_hf(
        config_json, _json_object(generation, _read(generation)) if generation.is_file() else None
    )
    settings = _settings(folder)
    tokenizer, tokens = _tokenizer(folder, config, config_json, settings)
    template = _chat_template(folder, settings)
    return ModelCard(
        name=name or folder.resolve().name,
        config=config,
        fingerprint=_checkpoint_fingerprint(folder, config_bytes),
        tokenizer=tokenizer,
        chat_template=JinjaChatTemplate(template, tokenizer, tokens, strftime_now),
        path=folder,
        own_chat_template=template is not None,
    )


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of a checkpoint in name order: those of the index if there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _json_object(index, _read(index)).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise InvalidArgument(f"{index.name}: weight_map must map tensor names to file names", field="model")
        names = sorted(set(weight_map.values()))
        for file_name in names:
            # Only names of files beside the index are allowed; a path could point anywhere.
            if Path(file_name).name != file_name:
                raise InvalidArgument(f"{index.name}: {file_name!r} is not a plain file name", field="model")
        files = [folder / file_name for file_name in names]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
    if not files or len(files) > FILES_MAX:
        raise InvalidArgument(f"{folder.name}: {len(files)} safetensors files found", field="model")
    for file in files:
        if not file.is_file():
            raise InvalidArgument(f"{folder.name}: {file.name} is missing", field="model")
    return files


def _builtin_card(name: str) -> ModelCard:
    config = builtin_config()
    digest = xxh3_128()
    digest.update(json.dumps([BUILTIN_RECIPE, BUILTIN_SEED, asdict(config)], sort_keys=True).encode())
    return ModelCard(name, config, digest.hexdigest(), ByteTokenizer(), ByteChatTemplate())


def _checkpoint_fingerprint(folder: Path, config_bytes: bytes) -> str:
    digest = xxh3_128()
    digest.update(len(config_bytes).to_bytes(8, "little") + config_bytes)
    for file in checkpoint_files(folder):
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise InvalidArgument(f"{file.name}: not a safetensors file, or truncated", field="model")
            header = stream.read(length)
            digest.update(file.name.encode() + b"\0" + size.to_bytes(8, "little") + prefix + header)
            for begin, end in _tensor_ranges(file, header, size - 8 - length):
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    stream.seek(8 + length + offset)
                    digest.update(stream.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _tensor_ranges(file: Path, header: bytes, data_bytes: int) -> list[tuple[int, int]]:
    """Returns ``(begin, end)`` of each tensor in the file's data, in file order."""
    ranges = []
    for name, entry in _json_object(file, header).items():
        if name == "__metadata__":
            continue
        match entry:
            case {"data_offsets": [int(begin), int(end)]} if 0 <= begin <= end <= data_bytes:
                ranges.append((begin, end))
            case _:
                raise InvalidArgument(
                    f"{file.name}: malformed header, or truncated: tensor {name[:200]}", field="model"
                )
    return sorted(ranges)


def _settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json's object; older checkpoints have their special tokens in a separate file."""
    path = folder / "tokenizer_config.json"
    settings = _json_object(path, _read(path)) if path.is_file() else {}
    names = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and names.is_file():
        settings |= _json_object(names, _read(names))
    return settings


def _tokenizer(
    folder: Path, config: ModelConfig, config_json: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[HfTokenizer, dict[str, str]]:
    """Returns the tokenizer and the named special tokens."""
    path = folder / "tokenizer.json"
    text = _text(path)
    rules = _json_object(path, text.encode())
    try:
        kind = tokenizer_class(rules, settings, config_json)
        made = tokenizer_rules(rules, settings, kind, config.vocab_size)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"tokenizer.json or tokenizer_config.json is malformed: {error!r}", field="model"
        ) from error
    tokenizer = HfTokenizer(text if made == rules else json.dumps(made, ensure_ascii=False), config.eos_token_ids)
    # Checkpoints often pad the embedding beyond the tokenizer. A larger tokenizer would have tokens without an
    # embedding.
    if tokenizer.vocab_size > config.vocab_size:
        raise InvalidArgument(
            f"tokenizer.json has {tokenizer.vocab_size} tokens, the model only {config.vocab_size}", field="model"
        )
    return tokenizer, named_tokens(settings, kind)


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    source: Any = settings.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        by_name = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = by_name.get("default")
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        source = _text(jinja)
    if source is not None and not isinstance(source, str):
        raise InvalidArgument("tokenizer_config.json: chat_template must be a string", field="model")
    return source


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise InvalidArgument(f"{path.parent.name}: {path.name} is missing", field="model")
    if path.stat().st_size > JSON_BYTES_MAX:
        raise InvalidArgument(f"{path.name} is larger than {JSON_BYTES_MAX} bytes", field="model")
    return path.read_bytes()


def _text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path.name} is not UTF-8: {error}", field="model") from error


def _json_object(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path.name} is not valid JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path.name} must hold a JSON object", field="model")
    return value
