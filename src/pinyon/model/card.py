"""The model card: all that a service without weights must know of the model it serves.

The fingerprint goes into the block keys' namespace, so two services reuse each other's KV only if they have the same
fingerprint. For a checkpoint it covers ``config.json``, the headers of the safetensors files (names, types, shapes,
offsets) and their sizes, not the gigabytes behind them. A fine-tune differs from its base in none of these, so a few
bytes of every tensor are hashed too: loading a card reads about a kilobyte per tensor."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from pinyon.core.errors import InvalidArgument, NotFound, PinyonError
from pinyon.model.builtin import BUILTIN_RECIPE, BUILTIN_SEED, builtin_config
from pinyon.model.chat_template import ByteChatTemplate, ChatTemplate, JinjaChatTemplate
from pinyon.model.checkpoint import checkpoint_files, json_object, read_bytes, read_header, read_text
from pinyon.model.config import ModelConfig
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from pinyon.model.tokenizer_files import named_tokens, tokenizer_class, tokenizer_rules

_log = logging.getLogger("pinyon.model")

BUILTIN_NAME = "pinyon-tiny"

# The beginning, middle and end of each tensor are hashed: merging even a small adapter into a matrix changes all of its
# values.
_SAMPLE_BYTES = 256


@dataclass(frozen=True)
class ModelCard:
    """A model's identity and text tools. ``path`` is None for the built-in model. ``fingerprint`` is 32 hex digits.

    ``own_chat_template`` is True if the checkpoint has a template. Otherwise conversations are written as plain lines,
    on which no model was trained."""

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
    missing, malformed or unsupported."""
    if model is None:
        return _builtin_card(name or BUILTIN_NAME)
    folder = Path(model).absolute()
    if not folder.is_dir():
        raise NotFound(f"no model folder at {model}", field="model")
    config_bytes = read_bytes(folder / "config.json")
    config_json = json_object(folder / "config.json", config_bytes)
    generation = folder / "generation_config.json"
    config = ModelConfig.from_hf(
        config_json, json_object(generation, read_bytes(generation)) if generation.is_file() else None
    )
    settings = _settings(folder)
    tokenizer, tokens = _tokenizer(folder, config, config_json, settings)
    template = _chat_template(folder, settings)
    return ModelCard(
        name=name or folder.resolve().name,
        config=config,
        fingerprint=checkpoint_fingerprint(folder, config_bytes),
        tokenizer=tokenizer,
        chat_template=JinjaChatTemplate(template, tokenizer, tokens, strftime_now),
        path=folder,
        own_chat_template=template is not None,
    )


def _builtin_card(name: str) -> ModelCard:
    config = builtin_config()
    digest = xxh3_128()
    digest.update(json.dumps([BUILTIN_RECIPE, BUILTIN_SEED, asdict(config)], sort_keys=True).encode())
    return ModelCard(name, config, digest.hexdigest(), ByteTokenizer(), ByteChatTemplate())


def checkpoint_fingerprint(folder: Path, config_bytes: bytes) -> str:
    """Returns the name of a checkpoint's weights, by its configuration and by shapes and samples of its tensors."""
    digest = xxh3_128()
    digest.update(len(config_bytes).to_bytes(8, "little") + config_bytes)
    for file in checkpoint_files(folder):
        header, tensors = read_header(file)
        digest.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little") + header)
        with file.open("rb") as stream:
            for begin, end in sorted((each.start, each.start + each.size) for each in tensors.values()):
                for offset in (begin, (begin + end) // 2, max(begin, end - _SAMPLE_BYTES)):
                    stream.seek(offset)
                    digest.update(stream.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def weights_name(model: str, revision: str) -> str:
    """Returns a name for the weights of a model that another engine loads: of a folder by its content.

    Where that cannot be read, sizes and times of the files stand for it. What is no path goes by name and revision."""
    path = Path(model)
    if not path.exists():
        return f"{model}@{revision}"
    try:
        if (path / "config.json").is_file():
            return checkpoint_fingerprint(path, (path / "config.json").read_bytes())
    except (PinyonError, OSError) as error:
        _log.warning("%s is known by its files' sizes and times only: %s", path, error)
    files = [path] if path.is_file() else [each for each in sorted(path.iterdir()) if each.is_file()]
    stats = [(each.name, each.stat()) for each in files]
    return json.dumps([model, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)])


def _settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json's object; older checkpoints have their special tokens in a separate file."""
    path = folder / "tokenizer_config.json"
    settings = json_object(path, read_bytes(path)) if path.is_file() else {}
    names = folder / "special_tokens_map.json"
    if "added_tokens_decoder" not in settings and names.is_file():
        settings |= json_object(names, read_bytes(names))
    return settings


def _tokenizer(
    folder: Path, config: ModelConfig, config_json: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[HfTokenizer, dict[str, str]]:
    """Returns the tokenizer and the named special tokens."""
    path = folder / "tokenizer.json"
    text = read_text(path)
    rules = json_object(path, text.encode())
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
        source = read_text(jinja)
    if source is not None and not isinstance(source, str):
        raise InvalidArgument("tokenizer_config.json: chat_template must be a string", field="model")
    return source
