"""HOW a program is executed: one package for each wire."""
