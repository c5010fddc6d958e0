"""Serving: requests from a trace to tokens; prefill, decode, their times and their schedule."""
