"""What goes wrong in practice with nets whose samples are split: cases from public bug reports, by kind."""
