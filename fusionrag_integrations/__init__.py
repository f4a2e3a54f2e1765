"""Adapters of the FusionRAG engine, one subpackage a framework. Importing this package imports none of them."""

__version__ = "0.1.0"
