"""A recurrent draft head: `drafter` decodes with it, `training` trains it (and alone needs `hf-speculate[train]`)."""
