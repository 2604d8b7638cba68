"""MXNet's key-value store without MXNet: stores, their updaters and the arrays that they take. No framework is imported.

Users import :mod:`hvdlab.kvstore`.
"""
