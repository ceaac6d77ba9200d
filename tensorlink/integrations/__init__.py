"""TensorLink inside other frameworks, one package or module each. None is imported unless it is asked for."""
