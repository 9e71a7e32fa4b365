"""Measurements on trained models: pure functions from tensors to numbers, and their reports.

Everything is computed by NumPy in float64. Each function's docstring begins with what its number
is: *measured* (read off the tensors given), *bound* (a certified limit) or *proxy* (cheaper, and
only correlated with what is meant).
"""
