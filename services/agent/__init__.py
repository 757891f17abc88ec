"""The agent beside an inference server that knows nothing of pinyon: it reports the server as an instance."""
