"""The front door process of a region: OpenAI HTTP and gRPC, queue, pushing."""
