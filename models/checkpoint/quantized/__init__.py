"""Quantised matrices of checkpoint folders, a module for each family of formats: the tensors that a file has for one
matrix become one entry, which is read as floats."""
