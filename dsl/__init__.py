"""The kernel language: grammar, parser, checker, diagnostics and formatter. Imports nothing else of kgen."""
