"""What watches a running job: status of the ranks, stalls, failures and signals, heartbeats, metrics."""
