"""A model apart from its weights: configuration, identity, tokens, chat template, stop strings.

The load balancer needs all of this and no weights; the worker's engine needs the configuration."""

from __future__ import annotations

from pinyon.model.card import BUILTIN_NAME, ModelCard, load_card
from pinyon.model.chat_template import ChatTemplate
from pinyon.model.config import ModelConfig, RopeScaling
from pinyon.model.detokenizer import IncrementalDetokenizer
from pinyon.model.stop import StopMatcher
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer

__all__ = [
    "BUILTIN_NAME",
    "ByteTokenizer",
    "ChatTemplate",
    "HfTokenizer",
    "IncrementalDetokenizer",
    "ModelCard",
    "ModelConfig",
    "RopeScaling",
    "StopMatcher",
    "Tokenizer",
    "load_card",
]
