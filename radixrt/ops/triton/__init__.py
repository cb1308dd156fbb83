"""The operations as Triton kernels: free functions with the signatures of ``Ops``, each module tested against ``ops.torch``.

Importing a module of this package needs ``triton``; nothing outside imports one before a device asked for it.
"""
