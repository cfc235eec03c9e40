"""What ``torchmpi bench`` is made of: jobs, contestants, the clock, tables and plots."""
