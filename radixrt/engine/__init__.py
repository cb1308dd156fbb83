"""The engine: requests in, tokens out. ``core`` is synchronous, ``async_engine`` serves an event loop from a thread."""
