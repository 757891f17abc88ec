"""gRPC's HTTP/2 within the event loop: the session streams between services, without threads and hand-overs.

What peers see is gRPC (RFC 9113 under gRPC's own protocol): either end may be grpcio instead.
"""
