"""`naiad convert`: models of one framework made into files that a backend serves, with the configuration.

The frameworks' own converters do the work, in a process of its own (`process.py`); the result is loaded by the very
backend that will serve it, and compared with the source before anything is written. The command line is in `naiad.cli`.
"""
