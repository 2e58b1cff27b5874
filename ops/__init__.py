"""Operators written in the kernel language, their functional API and modules."""
