"""Descriptions of machines and their devices."""
