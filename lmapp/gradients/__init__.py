"""What happens to gradients, as pure functions: `clipping`, `truncation` (where it cuts), `decay` (against lag)."""
