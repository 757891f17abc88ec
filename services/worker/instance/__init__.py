"""The instance at work: its engine step by step, and the parts that prompts and requests share."""
