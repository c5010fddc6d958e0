"""What a run leaves behind: digest, journal, record, report."""
