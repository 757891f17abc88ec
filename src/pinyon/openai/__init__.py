"""OpenAI's API as values: bodies are parsed into values, and answers are written from values. Nothing here waits."""
