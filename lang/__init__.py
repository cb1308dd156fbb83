"""The room of the language in which agent programs are written: it will sit on top of an engine or a server.

Invariants: knows nothing of tensors; nothing happens at import.
"""
