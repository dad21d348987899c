"""Any model as features and logits: loading, checkpoints, fingerprints."""
