"""pinyon: serving LLM requests over a disaggregated KV cache.

The library decides, the services (``services/``) do. See ARCHITECTURE.md for the rooms and their import rules."""

__version__ = "0.3.0"
