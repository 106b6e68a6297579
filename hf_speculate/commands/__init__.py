"""What every command line shares: environment, prompts, targets and speculators by name, reporting, timing."""
