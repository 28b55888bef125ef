"""Verbs whose subject is a training script as it is: telling one from a recipe, and what each verb makes of it."""
