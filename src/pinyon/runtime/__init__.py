"""Edge: the parts that every service process needs: settings, process life, gRPC, telemetry, metrics, logs, Redis."""
