"""What each of the machine's three networks promises, on top of the emulator's links."""
