"""OpenAI servers of other makers as targets of requests."""
