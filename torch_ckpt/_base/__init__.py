"""What every part uses: the log, words for people, progress, options and paths."""
