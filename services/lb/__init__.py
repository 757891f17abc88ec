"""The regional front door process: OpenAI HTTP and gRPC, queue, pushing."""
