"""Edge: what every service process needs — settings, process life, gRPC set-up, telemetry, metrics, logs, Redis."""
