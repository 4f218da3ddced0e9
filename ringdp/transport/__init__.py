"""How a program is executed: one room a wire."""
