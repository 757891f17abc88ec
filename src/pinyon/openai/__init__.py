"""OpenAI's API as values: bodies are read into them, answers written from them. Nothing here waits."""
