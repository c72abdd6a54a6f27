"""Keeps the forward steps of a group of replicas in lockstep."""
