"""The prompts that this instance computes, and those that others compute for it."""
