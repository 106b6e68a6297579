"""The command line's entry: it answers `--help` and `--version` before anything heavy is imported."""
