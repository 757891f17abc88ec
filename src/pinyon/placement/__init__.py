"""The placement of requests on instances: block index, cost models, admission and policies."""
