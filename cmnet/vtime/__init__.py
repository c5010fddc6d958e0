"""Virtual time: the agenda and the horizon (pure), the loop that runs nodes, the conductor that grants."""
