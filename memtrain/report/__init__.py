"""What people see of a run: the choice and its comparison in the terminal, the progress of training, one picture per run."""
