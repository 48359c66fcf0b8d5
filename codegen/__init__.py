"""From a variant's name to its sources. Imports jinja2 and the standard library only."""
