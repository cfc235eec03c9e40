"""What ranks have before they communicate: launcher, MPI library or sockets of their own, network, cores."""
