"""A run: built from a recipe, trained, saved and resumed."""
