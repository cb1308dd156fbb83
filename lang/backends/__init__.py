"""What runs programs: the engine in this process, a server, an OpenAI-compatible server, a script."""
