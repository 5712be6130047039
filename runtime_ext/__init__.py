"""C++ sources of the engine: ``core`` knows no torch, ``torch`` binds it, ``cuda`` is the allocator shim."""
