"""
TensorLink's native core: memory, messages and copies. Private; use `tensorlink`.
"""
