"""Graph passes: they see operators by name in an FX graph and import neither the model nor the operators."""
