"""The nixl transport: one-sided READs by NIXL, the transfer library of NVIDIA Dynamo and what uses its connectors."""
