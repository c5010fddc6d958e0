"""The model that is served: identities of prompt rows, the seal-only body, and its oracle."""
