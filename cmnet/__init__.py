"""The emulator: virtual time, links, sockets, processes. It knows no LLM."""
