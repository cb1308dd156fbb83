"""The numerical operations, and the only code that knows which device it runs on.

``interface.Ops`` is what every implementation offers; ``load_ops`` picks one, once, when an engine starts.
"""
