"""What verbs that have a recipe for a subject make of a script."""
