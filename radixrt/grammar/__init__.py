"""Constrained decoding: what a user asks for (``Constraint``) becomes byte automata that say which tokens may come next."""
