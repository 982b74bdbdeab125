"""The parts of nibble.torch, each of which uses those before it alone:

threads, weights, operators, shards, layers, experts, parallel, probes, shared, fuse, convert
"""
