"""What ``transformers.Trainer`` is given, as what a memtrain Trainer is given (docs/from_hf.md)."""
