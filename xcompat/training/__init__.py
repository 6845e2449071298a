"""From a recipe to a trained, evaluated and reported model; the only code that knows the Trainer."""
