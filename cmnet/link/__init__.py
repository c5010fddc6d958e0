"""Links as pure arithmetic: ports (how long), rules (what goes wrong)."""
