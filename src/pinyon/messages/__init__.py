"""Conversions between messages and values: the only room that knows both ``pinyon.api`` and the values.

Input from outside is checked here, field by field: wrong input raises :class:`InvalidArgument` that names the message's
field."""
