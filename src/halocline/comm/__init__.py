"""Communication between ranks. Read in this order: comm, message, reduction, single, threads, then the transports."""
