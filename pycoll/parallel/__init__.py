"""Wrappers that train one model on many ranks or devices. Their public names are pycoll's own."""
