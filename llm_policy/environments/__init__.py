"""Environments as arrays: experts, exact judges, pictures. No language model in here."""
