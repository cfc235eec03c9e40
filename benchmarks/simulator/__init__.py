"""A simulator of jobs of many ranks: the code of the backends runs over simulated messages, in virtual time."""
