"""The built-in model with fewer, narrower layers: what clusters compute where a test asks how they serve, not how well
a large model is multiplied. A step takes a seventh, a prompt a twelfth of the processor time. Heads are grouped and
everything else is as in the whole one; that one serves in the tests of docker, exactness, models and sharing."""

from __future__ import annotations

from dataclasses import replace

from pinyon.model import ModelCard, card, load_card
from pinyon.model.builtin import builtin_config
from pinyon.model.config import ModelConfig


def small_config() -> ModelConfig:
    return replace(builtin_config(), num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2)


def use_small_model() -> None:
    """For this process, which is to be a service, and for good."""
    card.builtin_config = small_config


def small_card() -> ModelCard:
    """For an engine of one's own. Its fingerprint is the whole model's: nobody else is to see it."""
    return replace(load_card(None), config=small_config())
