"""What `make bench` measures: how fast the emulator is, beside plain sockets in the same run."""
