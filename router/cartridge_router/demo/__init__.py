"""`cartridge-router demo`: the whole chain on one machine, checked as it runs."""
