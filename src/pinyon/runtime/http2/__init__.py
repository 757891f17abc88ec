"""gRPC's HTTP/2 within the event loop, without threads and hand-overs: streams between services, and whole servers.

Peers see plain gRPC (RFC 9113 under gRPC's own protocol), so either end may be grpcio instead."""
