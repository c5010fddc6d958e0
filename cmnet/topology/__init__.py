"""The machine as data: a topology file, checked and numbered, with the path of any two devices."""
