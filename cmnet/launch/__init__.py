"""Processes up, watched, down: the zygote, the agent inside each process, the supervisor."""
