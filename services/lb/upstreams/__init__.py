"""The load balancer in front of other people's inference servers: any that speak OpenAI's HTTP interface.

Requests go on as they came and answers come back as they are; nothing here knows tokens. Who gets a request is decided
in :mod:`pinyon.routing`.
"""
