"""The built-in model with fewer and narrower layers, for clusters whose tests ask how they serve, not how they compute.

A step takes a seventh, a prompt a twelfth of the processor time. Heads are grouped, and all else is as in the whole
model, which serves in the tests of docker, exactness, models and sharing."""

from __future__ import annotations

from dataclasses import replace

from pinyon.model import ModelCard, card, load_card
from pinyon.model.builtin import builtin_config
from pinyon.model.config import ModelConfig


def small_config() -> ModelConfig:
    return replace(builtin_config(), num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)


def use_small_model() -> None:
    """Makes this process, which is to be a service, use the small model for good."""
    card.builtin_config = small_config


def small_card() -> ModelCard:
    """Returns the card for a test's own engine. Its fingerprint is the whole model's, so nobody else may see it."""
    return replace(load_card(None), config=small_config())
