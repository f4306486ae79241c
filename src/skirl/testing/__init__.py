"""Fakes and tiny models, shipped so that users can test their own rewards."""
