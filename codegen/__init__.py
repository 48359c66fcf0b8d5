"""From a variant's name to its C++ or CUDA sources. Imports jinja2 and the standard library only."""
