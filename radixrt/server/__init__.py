"""The server: an HTTP front in an event loop, and an engine in a process of its own behind it."""
