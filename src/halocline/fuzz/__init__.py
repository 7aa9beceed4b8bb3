"""Random nets, split at random, against one process. Read in this order: layers, net, check, shrink, search."""
