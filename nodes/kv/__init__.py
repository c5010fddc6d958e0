"""KV rows on their way from prefill to decode."""
