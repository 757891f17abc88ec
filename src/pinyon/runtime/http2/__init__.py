"""gRPC's HTTP/2 within the event loop, without threads and hand-overs: streams between services, and whole servers.

What peers see is gRPC (RFC 9113 under gRPC's own protocol): either end may be grpcio instead.
"""
