"""What happens to gradients, as pure functions: `clipping` (norms, events) and `decay` (gradient against lag)."""
