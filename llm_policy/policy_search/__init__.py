"""Policy search in context (ProPS): whoever proposes parameters is the optimiser."""
