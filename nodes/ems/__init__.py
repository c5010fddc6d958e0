"""The EMS store of one node: who owns a key, what is written, on which disk, in what time."""
