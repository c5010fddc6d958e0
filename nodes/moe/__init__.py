"""Mixture of experts between nodes: placement of experts, dispatch and combine."""
