"""Compiled CPU kernels: the decoder's layers, cache attention, cache copies and token sampling."""
