"""The instance at work: its engine step by step, and what prompts and requests share."""
