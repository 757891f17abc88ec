"""Messages to values and back, each said once: the only room that knows both ``pinyon.api`` and the values.

What comes from outside is checked here, field by field: a wrong input raises :class:`InvalidArgument` that names the
message's field.
"""
