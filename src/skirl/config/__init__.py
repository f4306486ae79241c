"""Recipes: schema, loading, provenance."""
