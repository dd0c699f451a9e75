"""Peaks that others measured on real cards and published, told again as jobs and plans of memtrain."""
