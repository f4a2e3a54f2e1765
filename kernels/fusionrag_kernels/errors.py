"""Errors of the package; all derive from KernelError."""


class KernelError(RuntimeError):
    """Base of every error that fusionrag_kernels raises for its caller."""


class ArgumentError(KernelError, ValueError):
    """An argument has the wrong shape, dtype, device or value."""


class ImplementationError(KernelError):
    """The implementation asked for by name is unknown or not available."""
