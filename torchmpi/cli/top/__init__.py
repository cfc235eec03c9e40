"""The command ``torchmpi top``: what the ranks of a running job do, in a terminal, in a browser, and as a report."""
