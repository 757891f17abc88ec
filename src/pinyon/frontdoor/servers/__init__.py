"""Instances of pinyon that have an OpenAI-compatible server of their own, such as vLLM, as targets of requests."""
